"""What the publisher asks the replay server about cells; blocking, any thread. No torch."""

from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from async_grpo.errors import WeightSyncError
from async_grpo.interfaces import PublishReplay
from async_grpo.replay_api.publishing import WaitCellReply
from async_grpo.replay_parts import Cell, CellPhase, Rendezvous, UpdateReport
from async_grpo.types import WeightsName

T = TypeVar("T")


class Call(Protocol):
    """Runs a coroutine of `PublishReplay` on its event loop and blocks for the result."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """The result; raises what the coroutine raises."""
        ...


class CellOrder:
    """One cell of one announcement.

    Args:
        replay: the server.
        call: runs its coroutines.
        sequence: publish_sequence of the announcement.
        cell: the engines.
        weights: that they are to get.
        timeout_s: deadline of each phase.
    """

    def __init__(
        self,
        replay: PublishReplay,
        call: Call,
        sequence: int,
        cell: Cell,
        weights: WeightsName,
        timeout_s: float,
    ) -> None:
        self.sequence, self.cell, self.weights = sequence, cell, weights
        self._replay, self._call, self._timeout_s = replay, call, timeout_s

    @property
    def peers(self) -> str:
        """Names of its engines, for messages."""
        return ", ".join(engine.engine_id for engine in self.cell.engines)

    def open(self, rendezvous: Rendezvous) -> None:
        """We listen, or go on in the group that exists."""
        self._call(self._replay.open_cell(self.sequence, self.cell.cell_id, rendezvous))

    def abort(self, reason: str) -> None:
        """Nothing will be sent."""
        self._call(self._replay.abort_cell(self.sequence, self.cell.cell_id, reason))

    def failed(self) -> str:
        """Which engines have failed by now, and why; empty: none. Does not wait."""
        reply = self._ask(CellPhase.COMMITTED, 0.0)
        return "; ".join(self._short_of(CellPhase.ANNOUNCED, reply))

    def require(self, phase: CellPhase) -> dict[str, UpdateReport]:
        """Wait until every engine is at `phase`; what those that have committed tell.

        Raises:
            WeightSyncError: one failed, or is not there at the deadline; names them.
        """
        reply = self._ask(phase, self._timeout_s)
        if missing := self._short_of(phase, reply):
            raise WeightSyncError(self.peers, str(self.weights), phase.value, "; ".join(missing))
        return reply.reports

    def _ask(self, phase: CellPhase, timeout_s: float) -> WaitCellReply:
        return self._call(
            self._replay.wait_cell(self.sequence, self.cell.cell_id, phase, timeout_s=timeout_s)
        )

    def _short_of(self, phase: CellPhase, reply: WaitCellReply) -> list[str]:
        missing = []
        for engine in self.cell.engines:
            reached = reply.phases.get(engine.engine_id, CellPhase.ANNOUNCED)
            if reached is CellPhase.FAILED or not reached.has_reached(phase):
                detail = reply.details.get(engine.engine_id, "")
                missing.append(f"{engine.engine_id} is {reached.value}{detail and f': {detail}'}")
        return missing
