"""Section `generation`: sampling."""

from collections.abc import Iterator
from dataclasses import dataclass

from async_grpo.config.ranges import not_negative, positive


@dataclass(kw_only=True)
class GenerationSection:
    """Sampling. Training data needs the full distribution, so top_p, top_k and min_p are fixed."""

    group_size: int = 8
    """Completions per prompt."""
    max_new_tokens: int = 256
    """Budget of one completion."""
    temperature: float = 1.0
    """Sampling temperature; the trainer scores with the same one."""
    max_running_groups: int = 0
    """Groups that one generator works on at a time; 0: as many as fill its engines' slots."""
    group_timeout_s: float = 600.0
    """From claim to first insert attempt; past it the ticket is reissued."""
    request_timeout_s: float = 300.0
    """One HTTP request to an engine."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from positive(
            where, self, "group_size", "max_new_tokens", "temperature", "group_timeout_s",
            "request_timeout_s",
        )  # fmt: skip
        yield from not_negative(where, self, "max_running_groups")
