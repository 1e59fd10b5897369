"""Section `weights`: weight sync."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.config.policy import DType
from async_grpo.config.ranges import not_negative, positive


class Backend(StrEnum):
    """Collective library of the weight broadcast."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class Transport(StrEnum):
    """How weights travel from trainer rank 0 to engines."""

    broadcast = "broadcast"
    disk = "disk"
    http = "http"


NOISE_MARGIN = 2.5
"""Engine and trainer round differently, each as far from the exact figure as the trainer alone.
Measured (docs/weights.md): correct engines are at most 1.7 times the trainer's own rounding off."""
LARGEST_TO_MEAN = 10.0
"""Of |log-prob differences| by rounding: the largest of a probe is four to ten times its mean."""


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """The largest |log-prob difference| on a probe that rounding explains, in nats."""

    mean: float
    """over its positions"""
    largest: float
    """of a single position"""

    def above(self, noise: float) -> "ProbeLimits":
        """Not below what a trainer's own rounding, as a mean in nats, makes likely."""
        return self.at_least(NOISE_MARGIN * noise)

    def at_least(self, mean: float) -> "ProbeLimits":
        """With a mean of at least so much."""
        return ProbeLimits(max(self.mean, mean), max(self.largest, LARGEST_TO_MEAN * mean))


PROBE_LIMITS = {
    DType.float64: ProbeLimits(mean=1e-3, largest=1e-3),
    DType.float32: ProbeLimits(mean=1e-3, largest=1e-3),
    DType.bfloat16: ProbeLimits(mean=0.05, largest=5.0),
}
"""The least ones by the policy's dtype; a model whose rounding is larger has larger ones."""


@dataclass(kw_only=True)
class WeightsSection:
    """Weight sync."""

    publish_every: int = 1
    """Train steps between publishes."""
    transport: Transport = Transport.broadcast
    """broadcast: by an update group of each cell; disk: as safetensors in `directory`; http:
    trainer rank 0 serves safetensors from memory, each generator fetches them."""
    late_transport: Transport | None = None
    """`transport` of an engine that started late or missed an update, and needs the present weights
    between two publishes; null: the same."""
    bucket_bytes: int = 512 << 20
    """Size of one broadcast, or of one file."""
    backend: Backend = Backend.auto
    """auto: nccl where SGLang is started on cards that are not the trainer's, else gloo; the
    trainer's log says which, and why."""
    host: str = "127.0.0.1"
    """Address of trainer rank 0 that engines can reach; with http, generators."""
    directory: str = ""
    """disk: a directory of this run alone that trainer, generators and engines see under this path;
    empty: `weights` in the run directory. Holds the newest weights, twice while they change."""
    download_directory: str = ""
    """http: where a generator puts what it fetches; its engines must see it under this path. Empty:
    a temporary directory."""
    engines_per_cell: int = 1
    """Engines that share one update group; a death costs one cell."""
    timeout_s: float = 120.0
    """Deadline of each phase of an update."""
    check_names: bool = True
    """Before its first update, ask an SGLang server whether it has every tensor that is to be sent:
    it ignores unknown names silently. false for a model whose names it changes in its own way."""
    max_failures: int = 5
    """Failed updates in a row after which an engine is dead. Broadcasts and files are counted
    apart: a restarted engine that loads files proves nothing about broadcasts."""
    probe_tolerance: float = 0.0
    """Largest mean |log-prob difference| (nats) between trainer and engine on the probe. 0: 2.5
    times the rounding that the trainer measures at its start, and at least 0.05 with bfloat16,
    0.001 else. A single position may differ by ten times as much, and by 5 with bfloat16."""
    check_arrival: bool = True
    """Fail an update after which a tensor of the engine has the checksum that it had with other
    bytes of the trainer's; false: only tell. For an engine that stores weights in a coarser format
    without saying so, where a small step may vanish."""

    def probe_limits(self, dtype: DType, noise: float) -> ProbeLimits:
        """What a probe may differ by.

        Args:
            dtype: of the policy.
            noise: mean |log-prob difference| of the trainer's own rounding on the probe, nats.
        """
        least = PROBE_LIMITS[dtype]
        if self.probe_tolerance:
            largest = least.at_least(self.probe_tolerance).largest
            return ProbeLimits(self.probe_tolerance, largest)
        return least.above(noise)

    def transports(self) -> set[Transport]:
        """All that may be used."""
        return {self.transport, self.late_transport or self.transport}

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from positive(
            where, self, "publish_every", "bucket_bytes", "engines_per_cell", "timeout_s",
            "max_failures",
        )  # fmt: skip
        yield from not_negative(where, self, "probe_tolerance")
        if self.host in ("", "0.0.0.0", "::"):
            yield f"{where}.host is told to the others: it must be one address, got {self.host!r}"
        if self.directory and Transport.disk not in self.transports():
            yield f"{where}.directory has no effect unless {where}.transport is disk"
        if self.download_directory and Transport.http not in self.transports():
            yield f"{where}.download_directory has no effect unless {where}.transport is http"
