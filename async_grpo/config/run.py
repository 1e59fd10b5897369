"""Section `run`: the run as a whole."""

from collections.abc import Iterator
from dataclasses import dataclass

from async_grpo.config.ranges import positive


@dataclass(kw_only=True)
class RunSection:
    """The run as a whole."""

    output_dir: str
    """Run directory: configuration, ledger, logs, metrics, the trained model."""
    num_train_steps: int
    """Train steps; the policy_version at the end."""
    seed: int = 0
    """Seeds the prompt order, the sampling and the trainer."""
    no_progress_timeout_s: float = 900.0
    """The trainer ends the run with exit code 3 when no groups arrive for this long."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        if not self.output_dir:
            yield f"{where}.output_dir must name a directory"
        yield from positive(where, self, "num_train_steps", "no_progress_timeout_s")
