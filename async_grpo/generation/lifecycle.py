"""Engine slots: a server is started or attached to, watched, and replaced when its life ends.

    start / attach --> wait until it is ready --> Engine (syncing, serving, ...) --> condemned
          ^                                                                            |
          +----- back-off, engine.max_restarts an hour of service (own engines) <------+

A life ends when the process exits, when /server_info goes unanswered twice, when the engine is not
ready for too long, when its weights bear another name, or when someone condemns it. A server of our
own is then killed; an attached one is sent nothing more until it answers again, however often. One
that ends because of its configuration is not started again, as it would end the same way; one that
another slot drives, or that is no engine, is not asked again. Knows nothing of requests, of
updates, or of how a process is started (`starts`).
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable

from async_grpo.config.engine import EngineSection
from async_grpo.engine_api import ServerInfo
from async_grpo.errors import EngineMisconfigured, GenerationError
from async_grpo.generation.engines import Engine, UpdateKind
from async_grpo.generation.handles import EngineHandle, StartEngine
from async_grpo.generation.handshake import Greeted, shake_hands
from async_grpo.generation.holding import ANSWER_S, LOOK_S, identity, let_go, watch_name
from async_grpo.generation.names import Holder
from async_grpo.interfaces import Clock, EngineClient
from async_grpo.replay_parts import EngineState, EngineStatus
from async_grpo.transport.restarts import RestartBudget

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
READY_RETRY_S = 0.2
"""Between questions to a server that does not answer yet."""
LIVENESS_FAILURES = 2
"""Unanswered /server_info in a row that end a life: one may be a busy moment."""


MakeClient = Callable[[str], EngineClient]
"""Connections to the server at a URL."""


class EngineSlot:
    """One place for an engine; holds the lives that follow each other in it.

    Args:
        name: `{generator}/{slot}`, for ids.
        start: starts or attaches; gets the engine's id.
        make_client: connections to a URL.
        section: deadlines and the budget of restarts.
        liveness_s: interval of /server_info.
        on_change: called when the status changes.
        run: token of the run, for the names of weights.
        max_failed_updates: weight updates of one kind that may fail in a row; None: any number.
        answer_s: for the answer of another slot whose name a server bears.
        clock: seconds, of the time that engines serve.

    Attributes:
        engine: the present life, or None between lives.
        last_error: why the newest life ended, in one line.
        last_words: the same, with the end of its log.
        failed: the budget of restarts, or of failed updates, is used up, or no start can succeed.
        misconfigured: the process ended because of its configuration, another slot drives the
            server, or what answers is no engine.
        refused: an attached server answers, but is not for this run as it is; it is asked again.
    """

    def __init__(
        self,
        name: str,
        start: StartEngine,
        make_client: MakeClient,
        section: EngineSection,
        *,
        liveness_s: float,
        on_change: Callable[[], None],
        run: str,
        max_failed_updates: int | None = None,
        answer_s: float = ANSWER_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self._name = name
        self._start = start
        self._make_client = make_client
        self._section = section
        self._liveness_s = liveness_s
        self._on_change = on_change
        self._max_failed_updates = max_failed_updates
        self._me, self._answer_s = Holder.of(run, name), answer_s
        self._num_failed_updates: Counter[UpdateKind] = Counter()
        self._clock = clock
        self._budget = RestartBudget(section.max_restarts)
        # a restarted generator must not repeat the ids of the one before it
        self._process_token = secrets.token_hex(3)
        self._next_id = self._id(1)
        self._between = EngineState.STARTING
        self._left_group = ""
        self.engine: Engine | None = None
        self.last_error = self.last_words = ""
        self.failed = self.misconfigured = self.refused = False

    def _id(self, start: int) -> str:
        return f"{self._name}#{self._process_token}-{start}"

    @property
    def status(self) -> EngineStatus:
        """For the heartbeat."""
        if self.engine is not None:
            return self.engine.status
        return EngineStatus(engine_id=self._next_id, state=self._between)

    async def run(self) -> None:
        """Keep an engine in this slot; returns when the budget of restarts is used up.

        Cancel it to end the engine cleanly.
        """
        backoff_s = FIRST_BACKOFF_S
        for start in itertools.count(1):
            self._next_id = self._id(start)
            handle: EngineHandle | None = None
            served = False
            try:
                handle = await self._start(self._next_id)
                reason, served = await self._live(handle, self._next_id)
            except GenerationError as error:
                reason = str(error)
                self.misconfigured = isinstance(error, EngineMisconfigured)
                self.refused = not error.retryable
            owned = handle is None or handle.owned
            self.last_words = f"{self._next_id}: {reason}"
            self.last_error = self.last_words.partition("\n")[0]
            logger.warning("engine %s", self.last_words)
            if served:
                backoff_s = FIRST_BACKOFF_S
            if self._is_hopeless or (owned and not self._budget.take()):
                self._between = EngineState.DEAD
                self.failed = True
                self._on_change()
                return
            self._between = EngineState.STARTING if owned else EngineState.QUARANTINED
            self._next_id = self._id(start + 1)
            self._on_change()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    @property
    def _is_hopeless(self) -> bool:
        """Another life would not help: of its configuration, or of so many failed updates."""
        limit = self._max_failed_updates
        failures = max(self._num_failed_updates.values(), default=0)
        return self.misconfigured or (limit is not None and failures >= limit)

    def _count_updates(self, engine: Engine) -> None:
        """At the end of a life: a commit in it ends the row of failures before, of its kind."""
        for kind in engine.committed_updates:
            self._num_failed_updates[kind] = 0
        if engine.failed_update is not None:
            self._num_failed_updates[engine.failed_update] += 1

    async def _live(self, handle: EngineHandle, engine_id: str) -> tuple[str, bool]:
        """One life: (why it ended, whether it ever served)."""
        client = self._make_client(handle.url)
        clean = False
        try:
            greeted = await self._wait_ready(handle, client)
            self.refused = False
            life = Engine(engine_id, client, greeted.info, self._on_change, greeted.names)
            self.engine = life
            logger.info("engine %s answers at %s: %s", engine_id, handle.url, _summary(life.info))
            self._on_change()
            answered_s = self._clock()
            try:
                reason = await self._watch(handle, life)
            finally:
                if life.weights is not None:
                    self._budget.serve(self._clock() - answered_s)
            self.misconfigured = life.taken_by is not None
            return reason, life.weights is not None
        except asyncio.CancelledError:
            clean = True
            raise
        finally:
            engine, self.engine = self.engine, None
            if engine is not None:
                engine.condemn("the engine ended")
                self._left_group = engine.update_group
                self._count_updates(engine)
            if clean and not handle.owned and engine is not None:
                await let_go(client, engine.names)
            # first the connections: whatever waits for an answer is sampled elsewhere at once
            await client.close()
            await (handle.terminate() if clean else handle.kill())

    async def _wait_ready(self, handle: EngineHandle, client: EngineClient) -> Greeted:
        """Wait until it takes requests; an attached server may take for ever."""
        ended = asyncio.create_task(handle.wait())
        why_last_ended = self.last_error
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._section.start_timeout_s
        try:
            while True:
                try:
                    greeted = await shake_hands(
                        client,
                        me=self._me,
                        attached=not handle.owned,
                        left_group=self._left_group,
                        timeout_s=self._section.control_timeout_s,
                        answer_s=self._answer_s,
                    )
                    self.last_error = why_last_ended
                    return greeted
                except GenerationError as error:
                    if ended.done():  # result() may raise what says more
                        raise GenerationError(ended.result(), retryable=True) from error
                    if not error.retryable:
                        raise
                    if handle.owned and loop.time() > deadline:
                        raise GenerationError(
                            f"not ready within {self._section.start_timeout_s:g} s "
                            f"(engine.start_timeout_s): {error}",
                            retryable=True,
                        ) from error
                    before = f"; before: {why_last_ended}" if why_last_ended else ""
                    self.last_error = f"{self._next_id}: {error}{before}"
                await asyncio.wait([ended], timeout=READY_RETRY_S)
        finally:
            ended.cancel()

    async def _watch(self, handle: EngineHandle, engine: Engine) -> str:
        """Wait for the end of the engine's life; the reason."""
        waits = [
            asyncio.create_task(handle.wait()),
            asyncio.create_task(engine.condemned()),
            asyncio.create_task(self._unanswered(engine)),
            asyncio.create_task(watch_name(engine, min(LOOK_S, self._liveness_s))),
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return "; ".join(task.result() for task in waits if task in done)
        finally:
            for task in waits:
                task.cancel()

    async def _unanswered(self, engine: Engine) -> str:
        """Ask /ready and /server_info again and again; returns when it is out of order for good.

        /ready says whether to send it requests; whether it lives, only its scheduler can tell. Not
        during an update: that has its own deadlines, and a server may be busy receiving.
        """
        loop = asyncio.get_running_loop()
        failures = 0
        ready_s = loop.time()
        while failures < LIVENESS_FAILURES:
            await asyncio.sleep(self._liveness_s)
            if engine.updating:
                failures = 0
                ready_s = loop.time()
                continue
            try:
                ready = await engine.client.ready()
                info = await engine.client.server_info(timeout_s=self._section.control_timeout_s)
                failures = 0
            except GenerationError as error:
                failures += 1
                problem = str(error)
                continue
            if identity(info) != identity(engine.info):
                return f"another process answers at its address ({identity(info)})"
            if engine.updating or ready:
                ready_s = loop.time()
            if not engine.updating:
                engine.set_ready(ready)
            if (unready_s := loop.time() - ready_s) > self._section.start_timeout_s:
                return f"not ready for {unready_s:.0f} s, though no update is under way"
        return f"no sign of life: {problem}"


def _summary(info: ServerInfo) -> str:
    return (
        f"{info.engine} {info.version}, {info.max_running_requests} slots, context "
        f"{info.context_length}, {info.tp_size} ranks"
    )
