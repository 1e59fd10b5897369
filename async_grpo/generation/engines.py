"""One life of one inference server, from its first answer to its end.

A restart makes another `Engine` with another id, so nothing that was learned of one life is ever
believed of the next. Knows nothing of processes (`lifecycle`) or of the update protocol.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum

from async_grpo.engine_api import ServerInfo
from async_grpo.generation.names import GivenNames, Holder
from async_grpo.generation.update_modes import RecomputeCost
from async_grpo.interfaces import EngineClient
from async_grpo.replay_parts import EngineState, EngineStatus
from async_grpo.types import WeightsName

DEFAULT_SLOTS = 64
"""Requests at a time for a server that does not tell its limit."""


class UpdateKind(StrEnum):
    """How weights travel: one kind that works says nothing of the other."""

    BROADCAST = "broadcast"
    FILES = "files"


class Engine:
    """An inference server that answers. One event loop owns it.

    Args:
        engine_id: unique over the run.
        client: its connections; closed when this life ends.
        info: sizes it reported.
        on_change: called when its status changes, for heartbeats and routing.
        names: what it calls its weights.

    Attributes:
        num_running: requests in flight; the router counts them.
        update_group: name of the update group it is a member of; empty: none.
        update_lock: one update at a time.
        checksum: of the committed weights.
        recompute_cost: what retractions have cost on it.
        updated_s: when its last update ended, by the driver's clock.
        failed_update: how the update travelled that left weights which nobody knows, and ended
            this life; None: no update did.
        committed_updates: how those travelled that were committed in this life.
        taken_by: who else drives the server, which ended this life; None: nobody.
    """

    def __init__(
        self,
        engine_id: str,
        client: EngineClient,
        info: ServerInfo,
        on_change: Callable[[], None],
        names: GivenNames,
    ) -> None:
        self.engine_id = engine_id
        self.client = client
        self.info = info
        self.num_running = 0
        self.update_group = ""
        self.update_lock = asyncio.Lock()
        self.checksum = ""
        self.recompute_cost = RecomputeCost()
        self.updated_s: float | None = None
        self.failed_update: UpdateKind | None = None
        self.committed_updates: set[UpdateKind] = set()
        self.names = names
        self.taken_by: Holder | None = None
        self._on_change = on_change
        self._state = EngineState.SYNCING
        self._ready = True
        self._weights: WeightsName | None = None
        self._publish_sequence = 0
        self._updating = False
        self._probation: asyncio.Future[bool] | None = None
        self._condemned: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def num_slots(self) -> int:
        """Requests to have in flight: one place stays free for the probe of the next update."""
        return max(1, (self.info.max_running_requests or DEFAULT_SLOTS) - 1)

    @property
    def weights(self) -> WeightsName | None:
        """The committed weights: version and log-probs confirmed."""
        return self._weights

    @property
    def serving(self) -> bool:
        """May be sent requests."""
        return self._state is EngineState.SERVING and self._ready and not self._condemned.done()

    @property
    def updating(self) -> bool:
        """An update is under way."""
        return self._updating

    @property
    def status(self) -> EngineStatus:
        """For the heartbeat."""
        paused = self._state is EngineState.SERVING and not self._ready
        return EngineStatus(
            engine_id=self.engine_id,
            state=EngineState.PAUSED if paused else self._state,
            tp_size=self.info.tp_size,
            weights=self._weights,
            publish_sequence=self._publish_sequence,
            wants_sync=self._weights is None and not self._updating and not self._condemned.done(),
        )

    def set_ready(self, ready: bool) -> None:
        """Whether it takes requests, apart from updates: somebody else may have paused it."""
        if ready != self._ready:
            self._ready = ready
            self._on_change()

    @property
    def num_late_tokens(self) -> int:
        """Tokens at the head of a span that an in-place update opened, but sampled before it.

        Where the scheduler computes one step ahead, a token is under way when the pause comes, and
        counted when decoding goes on. (In the other modes SGLang counts it before.)
        """
        return 0 if self.info.disable_overlap_schedule else 1

    def begin_update(self, weights: WeightsName) -> None:
        """No more requests until `commit` or `keep_weights`.

        What ends meanwhile counts once the update has ended well: if somebody else closed its
        session, tokens were sampled from half of the weights, under the name before.

        Args:
            weights: that it is about to be sent.
        """
        self._updating = True
        self._ready = True  # the update pauses and resumes it from now on
        self.names.give(weights)
        self._probation = asyncio.get_running_loop().create_future()
        self._change(EngineState.SYNCING if self._weights is None else EngineState.PAUSED)

    async def cleared(self) -> bool:
        """Whether what it sampled until now may be used; waits for the end of an update.

        The update gives the verdict, after its probe and within its own deadlines.
        """
        if self._probation is not None and not await asyncio.shield(self._probation):
            return False
        return not self._condemned.done()

    def commit(
        self, weights: WeightsName, publish_sequence: int, checksum: str, kind: UpdateKind
    ) -> None:
        """The update is in and proven."""
        self.committed_updates.add(kind)
        self._weights = weights
        self._publish_sequence = publish_sequence
        self.checksum = checksum
        self._end_update(passed=True)
        self._change(EngineState.SERVING)

    def keep_weights(self) -> None:
        """The update ended before anything was sent; go on as before."""
        self._end_update(passed=True)
        self._change(EngineState.SYNCING if self._weights is None else EngineState.SERVING)

    def condemn(self, reason: str, *, taken_by: Holder | None = None) -> None:
        """This life is over; the slot ends it. What is in flight fails and is sampled elsewhere.

        Args:
            reason: for people.
            taken_by: somebody else drives the server: it must be left alone.
        """
        if not self._condemned.done():
            self.taken_by = taken_by
            self._condemned.set_result(reason)
        self._end_update(passed=False)
        self._change(EngineState.QUARANTINED)

    async def condemned(self) -> str:
        """Wait for `condemn`; the reason."""
        return await asyncio.shield(self._condemned)

    def _end_update(self, *, passed: bool) -> None:
        self._updating = False
        if self._probation is not None and not self._probation.done():
            self._probation.set_result(passed)

    def _change(self, state: EngineState) -> None:
        # the end of a life is final, whatever an update under way still says
        self._state = EngineState.QUARANTINED if self._condemned.done() else state
        self._on_change()
