"""Messages by which the trainer takes one set of weights to cells of engines."""

from typing import ClassVar

from async_grpo.replay_api.base import Message, Ok
from async_grpo.replay_parts import (
    BucketSpec,
    Cell,
    CellPhase,
    Probe,
    Rendezvous,
    UpdateReport,
    WeightFiles,
)
from async_grpo.types import WeightsName


class AnnounceReply(Message, frozen=True, kw_only=True, tag="AnnounceReply"):
    """The frozen cells; empty: nobody to publish to."""

    publish_sequence: int
    cells: list[Cell]


class Announce(Message, frozen=True, kw_only=True, tag="Announce"):
    """Start a publish. Idempotent by (incarnation, number)."""

    reply: ClassVar[type[Message]] = AnnounceReply
    incarnation: int
    number: int
    weights: WeightsName
    wished_only: bool
    """only to engines that wish, as cells of their own"""
    plan_hash: str
    buckets: list[BucketSpec]
    """empty with `files`"""
    probe: Probe
    digests: dict[str, int]
    """of the bytes of each tensor, by name: equal iff the bytes are, in one trainer's life"""
    files: WeightFiles | None = None
    """loaded by each engine for itself; no cell is opened"""


class OpenCell(Message, frozen=True, kw_only=True, tag="OpenCell"):
    """Trainer rank 0 listens for this cell. Idempotent."""

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    publish_sequence: int
    cell_id: int
    rendezvous: Rendezvous


class WaitCellReply(Message, frozen=True, kw_only=True, tag="WaitCellReply"):
    """Where each engine of the cell is."""

    phases: dict[str, CellPhase]
    details: dict[str, str]
    reports: dict[str, UpdateReport] = {}
    """of the engines that have committed"""

    def has_reached(self, phase: CellPhase) -> bool:
        """Whether no engine of the cell is still to reach `phase`."""
        return all(each.has_reached(phase) for each in self.phases.values())


class WaitCell(Message, frozen=True, kw_only=True, tag="WaitCell"):
    """Long poll until every engine of the cell is at `phase` or has failed."""

    reply: ClassVar[type[Message]] = WaitCellReply
    incarnation: int
    publish_sequence: int
    cell_id: int
    phase: CellPhase
    wait_s: float


class AbortCell(Message, frozen=True, kw_only=True, tag="AbortCell"):
    """Nothing (more) will be broadcast to this cell. Idempotent."""

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    publish_sequence: int
    cell_id: int
    reason: str
