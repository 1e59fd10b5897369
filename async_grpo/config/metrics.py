"""Section `metrics`: what is written where."""

from collections.abc import Iterator
from dataclasses import dataclass

from async_grpo.config.ranges import not_negative


@dataclass(kw_only=True)
class MetricsSection:
    """What is written where."""

    tensorboard: bool = True
    """Write `tensorboard/` in the run directory."""
    max_samples_per_step: int = 4
    """Completions that each generator writes to `samples.jsonl` per policy version, for training
    and for evaluation alike; 0: none."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from not_negative(where, self, "max_samples_per_step")
