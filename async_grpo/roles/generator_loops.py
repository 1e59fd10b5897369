"""The generator: drives engines, turns tickets into groups, keeps the engines' weights current.

                       replay server
        claim |  watch |  heartbeat |   ^ insert, end       ^ phases
              v        v            |   |                   |
    claim loop    watch loop    heartbeat loop              |
        |           |      |                                |
        | ticket    | cancel   orders                       |
        v           v      v                                |
       GroupRunner  <-+   WeightDriver ---------------------+
        |  members          |  pause, begin, buckets, probe
        v                   v
       Router ---------> engines  <--- one EngineSlot per engine: start, watch, restart

Who waits for what, and who unblocks it:

    claim loop      a free engine slot        a request that ends, an engine that begins to serve
    claim loop      a ticket                  the server; a long poll, asked again
    watch loop      news                      the server; a long poll, asked again
    a member        room on an engine         as above; the group's deadline
    a member        the engine's reply        the engine; generation.request_timeout_s
    a group         its rewards               the pool; task.reward_timeout_s per completion
    a group         room in the buffer        the trainer; run.no_progress_timeout_s
    an update       `go`                      the trainer; weights.timeout_s
    an update       the engine                the engine; weights.timeout_s per phase
    an engine slot  the process's end         the operating system; engine.start_timeout_s at first

The first loop that fails ends the generator. It holds no state that anyone would miss.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from async_grpo.config.schema import Config
from async_grpo.errors import AsyncGrpoError, ConfigError, GenerationError
from async_grpo.generation.activity import Activity
from async_grpo.generation.engines import Engine
from async_grpo.generation.group_runner import GroupRunner
from async_grpo.generation.handles import StartEngine
from async_grpo.generation.lifecycle import EngineSlot, MakeClient
from async_grpo.generation.routing import Router
from async_grpo.generation.sample_log import SampleLog
from async_grpo.generation.sampler import Sampler
from async_grpo.generation.weight_driver import WeightDriver
from async_grpo.generation.witness import WitnessLog
from async_grpo.interfaces import Clock, GeneratorReplay, RewardPool, Tokenizer
from async_grpo.replay_parts import RoleStatus
from async_grpo.roles.generator_start import FirstTicket, Room
from async_grpo.tasks.prompts import PromptSource

logger = logging.getLogger(__name__)


class Generator:
    """All loops of one generator. One event loop owns it.

    Args:
        config: the run's.
        name: of this generator.
        run: token of the run.
        replay: the server.
        start_engines: one per engine slot.
        make_client: connections to an engine.
        prompts: prompt of an index.
        room: of the longest of them.
        tokenizer: of the policy.
        rewards: scores completions.
        witness: record of every group.
        samples: where a few completions are kept for people; None: nowhere.
        clock: seconds.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        run: str,
        replay: GeneratorReplay,
        start_engines: list[StartEngine],
        make_client: MakeClient,
        prompts: PromptSource,
        room: Room,
        tokenizer: Tokenizer,
        rewards: RewardPool,
        witness: WitnessLog,
        samples: SampleLog | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config
        self._room = room
        self._replay = replay
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._beat = asyncio.Event()
        timeout_s = config.run.no_progress_timeout_s
        self._first_ticket = FirstTicket(
            lambda: self._slots, timeout_s, clock, lambda: self._driver.last_error
        )
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._slots = [
            EngineSlot(
                f"{name}/{index}",
                start,
                make_client,
                config.engine,
                liveness_s=config.replay.heartbeat_s,
                on_change=self._on_engine_change,
                run=run,
                max_failed_updates=config.weights.max_failures,
                clock=clock,
            )
            for index, start in enumerate(start_engines)
        ]
        self._router = Router(self._engines, on_change=self._on_activity, clock=clock)
        eos = tokenizer.eos_token_id
        self._sampler = Sampler(
            self._router,
            config.generation,
            stop_token_ids=[] if eos is None else [eos],
            evaluation=config.eval,
            seed=config.run.seed,
            clock=clock,
        )
        self._runner = GroupRunner(
            config,
            name,
            replay=replay,
            router=self._router,
            sampler=self._sampler,
            prompts=prompts,
            tokenizer=tokenizer,
            rewards=rewards,
            witness=witness,
            on_change=self._on_activity,
            samples=samples,
            clock=clock,
        )
        self._driver = WeightDriver(
            replay,
            self._engines,
            self._spawn,
            config.weights,
            on_weight_update=config.generation.on_weight_update,
            dtype=config.policy.dtype,
            clock=clock,
        )
        self._activity = Activity(self._engines, lambda: self._runner.num_inserting, clock)
        self._create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
        self._reported = (clock(), 0)

    async def run(self) -> str:
        """Run until the server says that the run is over; returns its reason.

        Cancel it to stop: engines are ended either way.

        Raises:
            AsyncGrpoError: a peer is gone, no engine is left, or no reward can be computed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._create_task = group.create_task
                for slot in self._slots:
                    self._spawn(self._keep_engine(slot))
                self._spawn(self._first_ticket.wait())
                for loop in (self._claim_loop, self._watch_loop, self._heartbeat_loop):
                    self._spawn(loop())
                reason = await self._stopped
                for task in self._tasks:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise _first_named(errors) from errors
        finally:
            self._driver.close()
            await self._sampler.close()
        return reason

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside the rest; its failure ends the generator."""
        task = self._create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _engines(self) -> list[Engine]:
        return [slot.engine for slot in self._slots if slot.engine is not None]

    def _on_engine_change(self) -> None:
        self._router.dispatch()
        self._beat.set()

    def _on_activity(self) -> None:
        self._activity.update()

    async def _keep_engine(self, slot: EngineSlot) -> None:
        await slot.run()
        if not all(other.failed for other in self._slots):
            return
        for other in self._slots:
            if other.misconfigured:  # the exit code after which nobody starts us again
                raise ConfigError(f"no engine is left; {other.last_words}")
        raise GenerationError(
            "no engine is left, engine.max_restarts or weights.max_failures are used up; "
            f"{slot.last_words}",
            retryable=False,
        )

    async def _claim_loop(self) -> None:
        """One ticket at a time, for as long as an engine slot is free."""
        limit = asyncio.Semaphore(self._config.generation.max_running_groups or sys.maxsize)
        while True:
            await limit.acquire()
            ticket = None
            while ticket is None:
                await self._router.room()
                ticket = await self._replay.claim()
            self._first_ticket.arrived.set()
            # a callback, not a coroutine around it: cancelled before it begins, that one would
            # never await what it was given
            work = self._spawn(self._runner.start(ticket))
            work.add_done_callback(lambda _: limit.release())

    async def _watch_loop(self) -> None:
        """Orders, cancelled groups and the end of the run."""
        seen = 0
        while True:
            reply = await self._replay.watch(seen)
            seen = reply.revision
            self._first_ticket.trainer_seen |= reply.live is not None
            self._driver.on_orders(reply.orders)
            self._runner.cancel(reply.cancel)
            if reply.stop and not self._stopped.done():
                logger.info("the run is over: %s", reply.stop)
                self._stopped.set_result(reply.stop)

    async def _heartbeat_loop(self) -> None:
        """Every replay.heartbeat_s, and at once when an engine changes its state."""
        while True:
            self._beat.clear()
            for engine in self._engines():
                # before it has weights, and so before it samples anything
                context = engine.info.context_length
                self._room.require(context, f"context of engine {engine.engine_id}")
            await self._replay.heartbeat(
                [slot.status for slot in self._slots], self._runner.claims, self._status()
            )
            try:
                async with asyncio.timeout(self._config.replay.heartbeat_s):
                    await self._beat.wait()
            except TimeoutError:
                continue

    def _status(self) -> RoleStatus:
        counters = self._runner.counters
        now = self._clock()
        since, tokens_before = self._reported
        self._reported = (now, counters.num_tokens)
        elapsed = now - since
        return RoleStatus(
            state=self._activity.state,
            detail=f"{self._runner.num_groups} groups under way",
            last_error=next((f"given up: {s.last_error}" for s in self._slots if s.failed), "")
            or counters.last_error
            or self._driver.last_error
            or next((slot.last_error for slot in self._slots if slot.last_error), ""),
            metrics={
                "tokens_per_s": (counters.num_tokens - tokens_before) / elapsed if elapsed else 0.0,
                "running_requests": float(self._router.num_running),
                "slot_utilization": self._router.utilization(),
                "groups": float(counters.num_groups),
                "retries": float(self._sampler.num_retries),
                "continued": float(self._sampler.num_continued),
                "claims_lost": float(counters.num_claims_lost),
                "engines": float(len(self._slots)),
                "engines_given_up": float(sum(slot.failed for slot in self._slots)),
            },
            seconds=self._activity.seconds(),
        )


def _first_named(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: of our own ones the first, else the first of all."""
    named, _ = errors.split(AsyncGrpoError)
    found: BaseException = named or errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
