"""Complaints about numbers out of range."""

from collections.abc import Iterator


def positive(where: str, owner: object, *names: str) -> Iterator[str]:
    """A line for each named field that is not > 0."""
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            yield f"{where}.{name} must be > 0, got {value}"


def not_negative(where: str, owner: object, *names: str) -> Iterator[str]:
    """A line for each named field that is negative."""
    for name in names:
        value = getattr(owner, name)
        if not value >= 0:
            yield f"{where}.{name} must be >= 0, got {value}"
