"""Section `weights`: weight sync."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.config.ranges import positive


class Backend(StrEnum):
    """Collective library of the weight broadcast."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


@dataclass(kw_only=True)
class WeightsSection:
    """Weight sync."""

    publish_every: int = 1
    """Train steps between publishes."""
    bucket_bytes: int = 512 << 20
    """Size of one broadcast."""
    backend: Backend = Backend.auto
    """auto: nccl if both sides are on GPUs, else gloo."""
    host: str = "127.0.0.1"
    """Address of trainer rank 0 that engines can reach."""
    engines_per_cell: int = 1
    """Engines that share one update group; a death costs one cell."""
    timeout_s: float = 120.0
    """Deadline of each phase of an update."""
    max_failures: int = 5
    """Failed updates in a row after which an engine is dead."""
    probe_tolerance: float = 1e-3
    """Largest |log-prob difference| (nats) between trainer and engine on the probe."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from positive(
            where, self, "publish_every", "bucket_bytes", "engines_per_cell", "timeout_s",
            "max_failures", "probe_tolerance",
        )  # fmt: skip
