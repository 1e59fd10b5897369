"""What the publisher asks the replay server about cells; blocking, any thread. No torch."""

import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from async_grpo.errors import WeightSyncError
from async_grpo.interfaces import Clock, PublishReplay
from async_grpo.replay_api.publishing import WaitCellReply
from async_grpo.replay_parts import Cell, CellPhase, Rendezvous, UpdateReport
from async_grpo.types import WeightsName

T = TypeVar("T")

_SLACK_S = 2.0
"""At most so long after `weights.timeout_s` is a phase ended: whoever has that deadline himself
speaks first, and knows more."""


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
        clock: seconds.

    Attributes:
        phase: what the cell is at, for messages.
    """

    def __init__(
        self,
        replay: PublishReplay,
        call: Call,
        sequence: int,
        cell: Cell,
        weights: WeightsName,
        timeout_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self.sequence, self.cell, self.weights = sequence, cell, weights
        self._replay, self._call, self._timeout_s, self._clock = replay, call, timeout_s, clock
        self._limit_s = timeout_s + min(timeout_s, _SLACK_S)
        self._num_asking = 0
        self.enter("open")

    @property
    def peers(self) -> str:
        """Names of its engines, for messages."""
        return ", ".join(engine.engine_id for engine in self.cell.engines)

    def enter(self, phase: str) -> None:
        """From here on the cell is at `phase`, which has a deadline of its own."""
        self.phase, self._entered_s = phase, self._clock()

    def overdue(self) -> str:
        """Why the phase should have ended; empty: it is within its deadline."""
        if self._clock() - self._entered_s <= self._limit_s:
            return ""
        return f"it did not end within {self._timeout_s:g} s (weights.timeout_s)"

    def stuck(self) -> str:
        """Why nobody will end the phase either; empty: they may still.

        Twice the deadline, and the server was not asked meanwhile: its client has another one.
        """
        late = self._clock() - self._entered_s > 2 * self._limit_s
        return self.overdue() if late and not self._num_asking else ""

    def error(self, reason: str) -> WeightSyncError:
        """That names the cell's engines, the weights and the present phase."""
        return WeightSyncError(self.peers, str(self.weights), self.phase, reason)

    def open(self, rendezvous: Rendezvous) -> None:
        """We listen, or go on in the group that exists."""
        self._ask(self._replay.open_cell(self.sequence, self.cell.cell_id, rendezvous))

    def abort(self, reason: str) -> None:
        """Nothing will be sent."""
        self._ask(self._replay.abort_cell(self.sequence, self.cell.cell_id, reason))

    def failed(self, *, all_of_them: bool = False) -> str:
        """Which engines have failed by now, and why; empty: none. Does not wait.

        Args:
            all_of_them: empty unless every engine has.
        """
        failed = self._short_of(CellPhase.ANNOUNCED, self._wait(CellPhase.COMMITTED, 0.0))
        return "" if all_of_them and len(failed) < len(self.cell.engines) else "; ".join(failed)

    def require(self, phase: CellPhase) -> dict[str, UpdateReport]:
        """Wait until every engine is at `phase`; what those that have committed tell.

        Raises:
            WeightSyncError: one failed, or is not there at the deadline; names them.
        """
        self.enter(phase.value)
        reply = self._wait(phase, self._timeout_s)
        if missing := self._short_of(phase, reply):
            raise self.error("; ".join(missing))
        return reply.reports

    def _wait(self, phase: CellPhase, timeout_s: float) -> WaitCellReply:
        return self._ask(
            self._replay.wait_cell(self.sequence, self.cell.cell_id, phase, timeout_s=timeout_s)
        )

    def _ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        self._num_asking += 1
        try:
            return self._call(coroutine)
        finally:
            self._num_asking -= 1

    def _short_of(self, phase: CellPhase, reply: WaitCellReply) -> list[str]:
        missing = []
        for engine in self.cell.engines:
            reached = reply.phases.get(engine.engine_id, CellPhase.ANNOUNCED)
            if reached is CellPhase.FAILED or not reached.has_reached(phase):
                detail = reply.details.get(engine.engine_id, "")
                missing.append(f"{engine.engine_id} is {reached.value}{detail and f': {detail}'}")
        return missing
