"""Section `metrics`: what is written where."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class MetricsSection:
    """What is written where."""

    tensorboard: bool = True
    """Write `tensorboard/` in the run directory."""
