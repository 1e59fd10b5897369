"""Versions: lineage, steps acked, weights announced and live. Durable; changed by evolve only.

Knows nothing of engines; the course of a publish is in `publishing`.
"""

from dataclasses import dataclass, field

from async_grpo.replay.core.records import Announced, Settled, Trained, TrainerStarted
from async_grpo.types import WeightsName


@dataclass(slots=True)
class Versions:
    """The one line of weights that counts."""

    incarnation: int = 0
    instance: str = ""
    """the trainer that holds the incarnation"""
    restore_points: list[int] = field(default_factory=list)
    """policy_version that incarnation 1, 2, ... started from"""
    steps: dict[int, Trained] = field(default_factory=dict)
    """surviving steps that may still be undone, settled .. policy_version - 1"""
    settled: int = 0
    """steps before this one are final"""
    policy_version: int = 0
    """train steps acked"""
    live: WeightsName | None = None
    publish_sequence: int = 0
    announced: Announced | None = None
    """the newest publish"""
    finished: str = ""
    """why the run is over"""

    def on_lineage(self, weights: WeightsName) -> bool:
        """Whether no later incarnation has fallen back behind `weights`."""
        if not 1 <= weights.incarnation <= self.incarnation:
            return False
        later = self.restore_points[weights.incarnation :]
        return all(weights.policy_version <= restored for restored in later)

    def is_announced(self, weights: WeightsName) -> bool:
        """Whether these weights can exist at an engine: nobody has them before their publish."""
        if weights.incarnation < self.incarnation:
            return True  # bounded by the restore points: see `on_lineage`
        newest = self.newest_announced()
        return newest is not None and weights <= newest

    def newest_announced(self) -> WeightsName | None:
        """Weights of the newest publish of this incarnation."""
        if self.announced and self.announced.incarnation == self.incarnation:
            return self.announced.weights
        return None

    def train(self, record: Trained) -> None:
        """A step is acked."""
        self.steps[record.step] = record
        self.policy_version = record.step + 1

    def restorable(self, weights: WeightsName) -> bool:
        """Whether a trainer may go on from a checkpoint of these weights."""
        version = weights.policy_version
        return self.settled <= version <= self.policy_version and self.on_lineage(weights)

    def settle(self, record: Settled) -> None:
        """Steps before a version are final and forgotten."""
        for step in range(self.settled, record.policy_version):
            del self.steps[step]
        self.settled = record.policy_version

    def start(self, record: TrainerStarted) -> list[Trained]:
        """A trainer takes over; returns the steps that are void now."""
        self.incarnation = record.incarnation
        self.instance = record.instance
        self.restore_points.append(record.restored_version)
        voided = [
            self.steps.pop(step) for step in range(record.restored_version, self.policy_version)
        ]
        self.policy_version = record.restored_version
        self.live = None
        self.finished = ""
        return voided
