"""A run without a model: replay server, generator, publisher, and engines in processes with gloo.

Everything between the trainer's tensors and the engines' is real, wires and collectives included;
only sampling is scripted (`gloo_engine`), and not even that in `embedded_world`. The publisher's
calls block, so they run in threads.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from async_grpo.config.engine import EngineSection
from async_grpo.config.load import to_yaml
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.config.weights import WeightsSection
from async_grpo.generation.engines import Engine
from async_grpo.generation.handles import AttachedEngine
from async_grpo.interfaces import WeightSource
from async_grpo.replay.generator_client import GeneratorClient
from async_grpo.replay.server import ReplayServer
from async_grpo.replay.trainer_client import TrainerClient
from async_grpo.replay_parts import EngineState, EngineStatus, Probe, RoleStatus
from async_grpo.training.feed import Batch, LoopThread
from async_grpo.training.witness import StepWitness
from async_grpo.types import RolloutGroup, WeightsName
from async_grpo.weights.group import UpdateGroup, join_group
from async_grpo.weights.publish_result import PublishResult
from async_grpo.weights.publisher import WeightPublisher
from tests.fakes.engine_process import BuildEngine, EngineProcess
from tests.fakes.fake_engine import fake_prompt_logprobs, probe_of
from tests.fakes.generator_world import World
from tests.fakes.gloo_engine import SHAPES, checksum_of, scripted_engine
from tests.fakes.replay_harness import DATASET, at_address, replay_config

PROBE_IDS = [3, 4, 5, 6]
BUCKET_BYTES = 1 << 21
"""Two buckets of one tensor each."""


class Source:
    """`interfaces.WeightSource` of made-up tensors; each version has its own."""

    def __init__(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        self.tensors = {
            name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()
        }

    def named_tensors(self) -> Any:
        return iter(self.tensors.items())

    def probe(self) -> Probe:
        logprobs = fake_prompt_logprobs(checksum_of(self.tensors), PROBE_IDS)
        return probe_of(PROBE_IDS, logprobs, 1e-6)


class Clock:
    """Seconds by the publisher's back-off; moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class NoticingClient(GeneratorClient):
    """Tells the test what the generator says of its engines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engines: list[EngineStatus] = []
        self.changed = asyncio.Condition()

    async def heartbeat(
        self, engines: list[EngineStatus], claims: list[tuple[int, int]], status: RoleStatus
    ) -> None:
        await super().heartbeat(engines, claims, status)
        self.engines = engines
        async with self.changed:
            self.changed.notify_all()


class GlooWorld(World):
    """`World` with a real replay server, trainer's end and engines.

    Attributes:
        processes: every engine process, in order of start.
        slots: the newest of each slot.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_engines: int = 2,
        owned: bool = True,
        engines_per_cell: int = 1,
        tp_size: int = 1,
        timeout_s: float = 30.0,
        control_timeout_s: float = 30.0,
        max_restarts: int = 50,
        peer_timeout_s: float = 60.0,
        weights: dict[str, Any] | None = None,
        join: Callable[..., UpdateGroup] = join_group,
    ) -> None:
        super().__init__(directory, num_engines=num_engines, owned=owned, group_size=2)
        config = replay_config(directory, peer_timeout_s=peer_timeout_s)
        self._config = replace(
            config,
            # nobody draws, so the generator waits for room as long as the test takes
            run=replace(config.run, no_progress_timeout_s=1200.0),
            engine=EngineSection(max_restarts=max_restarts, control_timeout_s=control_timeout_s),
            weights=WeightsSection(
                bucket_bytes=BUCKET_BYTES,
                engines_per_cell=engines_per_cell,
                timeout_s=timeout_s,
                **(weights or {}),
            ),
        )
        self._join = join
        self.run_directory = RunDirectory(directory)
        self.run_directory.config.write_text(to_yaml(self._config))
        self.run_directory.logs.mkdir()
        self.witness_path = self.run_directory.generator_log("gen")
        self.processes: list[EngineProcess] = []
        self.slots: dict[int, EngineProcess] = {}
        self._build: BuildEngine = partial(scripted_engine, tp_size=tp_size, timeout_s=timeout_s)
        self._up_s = 180.0  # the first process imports torch
        self.clock = Clock()
        self.server: ReplayServer

    async def new_process(self, slot: int, *, port: int = 0) -> EngineProcess:
        """Start an engine process for a slot."""
        process = await EngineProcess.start(self._build, owned=self._owned, port=port)
        self.processes.append(process)
        self.slots[slot] = process
        return process

    async def _start_engine(self, slot: int, engine_id: str) -> Any:
        if self._owned:
            return await self.new_process(slot)
        return AttachedEngine(self.slots[slot].url)

    @asynccontextmanager
    async def whole(self, *, trainer: bool = True) -> AsyncIterator["GlooWorld"]:
        """Everything runs inside the block; with `trainer`, it has started."""
        async with AsyncExitStack() as stack:
            stack.callback(self._end_processes)
            await self.start_server(self._config)
            stack.push_async_callback(self.stop_server)
            self.config = at_address(self._config, self.server.address)
            self.replay = NoticingClient(self.config, name="gen", dataset=DATASET)
            stack.push_async_callback(self.replay.close)
            await self.replay.connect()
            loop = LoopThread("trainer")
            stack.callback(loop.close)
            self._trainer_end = TrainerEnd(
                self.config, loop, self.clock, self._make_source, join=self._join
            )
            stack.push_async_callback(asyncio.to_thread, self._trainer_end.close)
            if trainer:
                await self.start_trainer()
            await self._start_attached()
            async with self.running():
                await self.until(
                    lambda: self.num_wishing == self._num_engines, timeout_s=self._up_s
                )
                yield self

    def _make_source(self, version: int) -> WeightSource:
        """The trainer's weights of a version."""
        return Source(version)

    async def _start_attached(self) -> None:
        """Engines that are not the generator's run before it."""
        if not self._owned:
            for slot in range(self._num_engines):
                await self.new_process(slot)

    async def start_trainer(self) -> None:
        """Waits for a silent predecessor."""
        await asyncio.to_thread(self._trainer_end.start)

    @property
    def publisher(self) -> WeightPublisher:
        """Of the trainer in this process."""
        return self._trainer_end.publisher

    @property
    def incarnation(self) -> int:
        """Of the trainer in this process."""
        return self._trainer_end.incarnation

    async def start_server(self, config: Any) -> None:
        """A replay server, on a fresh port or where it was."""
        self.server = ReplayServer(config)
        self._serving = asyncio.create_task(self.server.serve())

    async def stop_server(self) -> None:
        """Its end; the ledger stays."""
        self.server.stop("the test says so")
        await self._serving
        self.server.close()

    def _end_processes(self) -> None:
        for process in self.processes:
            process.free()

    # ---- what the generator says

    @property
    def num_wishing(self) -> int:
        """Engines that want the current weights."""
        return sum(engine.wants_sync for engine in self.replay.engines)

    def status(self, slot: int) -> EngineStatus:
        """As in the newest heartbeat."""
        return self.replay.engines[slot]

    def engine(self, slot: int) -> Engine:
        """The present life in a slot."""
        engine = self.generator._slots[slot].engine
        assert engine is not None
        return engine

    def updating(self, slot: int) -> bool:
        """Whether an update is under way there."""
        engine = self.generator._slots[slot].engine
        return engine is not None and engine.updating

    def serves(self, version: int) -> bool:
        """Whether every engine serves these weights."""
        weights = WeightsName(self.incarnation, version)
        return all(
            (engine.state, engine.weights) == (EngineState.SERVING, weights)
            for engine in self.replay.engines
        )

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 120.0) -> None:
        """Wait for something that a heartbeat tells."""
        try:
            async with asyncio.timeout(timeout_s), self.replay.changed:
                await self.replay.changed.wait_for(condition)
        except TimeoutError:
            if self.task.done():
                self.task.result()
            raise AssertionError(f"not within {timeout_s:g} s: {self.replay.engines}") from None

    # ---- what the trainer does

    async def publish(self, version: int) -> PublishResult:
        """To all; waits for the end."""
        return await asyncio.to_thread(self._trainer_end.publish, version)

    async def train(self, step: int) -> list[RolloutGroup]:
        """The groups of a step, acked; see `TrainerEnd`."""
        async with asyncio.timeout(120):
            return await asyncio.to_thread(self._trainer_end.train, step, step + 1)

    async def serve_wishes(self) -> PublishResult:
        """The present weights once more, to those that wish for them."""
        self.clock.now += 100.0  # past any back-off
        return await asyncio.to_thread(self._trainer_end.republish)


class TrainerEnd:
    """The trainer's publisher and client. Blocking calls, not for the test's event loop."""

    def __init__(
        self,
        config: Config,
        loop: LoopThread,
        clock: Callable[[], float],
        make_source: Callable[[int], WeightSource],
        *,
        join: Callable[..., UpdateGroup] = join_group,
    ) -> None:
        self._config, self._loop, self._clock = config, loop, clock
        self._make_source, self._join = make_source, join
        self._client: TrainerClient | None = None
        self.incarnation = 0
        self.publisher: WeightPublisher

    def start(self) -> None:
        """Become the run's trainer, from version 0."""
        self._client = TrainerClient(self._config)
        self._loop.call(self._client.connect())
        self.incarnation = self._loop.call(self._client.start(0)).incarnation
        self.publisher = WeightPublisher(
            self._client,
            self._loop.call,
            self._config.weights,
            run_directory=Path(self._config.run.output_dir),
            clock=self._clock,
            join=self._join,
        )

    def publish(self, version: int) -> PublishResult:
        self.publisher.publish(WeightsName(self.incarnation, version), self._make_source(version))
        return self._ended()

    def republish(self) -> PublishResult:
        assert self.publisher.republish()
        return self._ended()

    def _ended(self) -> PublishResult:
        self.publisher.wait()
        result = self.publisher.last_result
        assert result is not None
        return result

    def train(self, step: int, draw_number: int) -> list[RolloutGroup]:
        """Draw and ack the groups of one step, in which nothing is learned; all are witnessed."""
        assert self._client is not None
        reply = self._loop.call(self._client.draw(draw_number, step))
        while not reply.groups:
            reply = self._loop.call(self._client.draw(draw_number, step))
        keys = [(leased.group_id, leased.attempt) for leased in reply.groups]
        groups = [self._loop.call(self._client.fetch(*key)) for key in keys]
        batch = Batch(
            draw_number=draw_number, train_version=step, leased=reply.groups, groups=groups,
            generated=reply.generated, drawn_s=0.0,
        )  # fmt: skip
        with StepWitness(RunDirectory(Path(self._config.run.output_dir)).steps) as witness:
            witness.write(self.incarnation, batch, self._config.staleness.max_staleness)
        self._loop.call(self._client.ack(step, draw_number, keys))
        return groups

    def close(self) -> None:
        if self._client is not None:
            self.publisher.close()
            self._loop.call(self._client.close())


def trainer_process(config: Config, pipe: Connection) -> None:
    """A trainer to be killed: publishes each version that it is sent, and answers with failures."""
    torch.set_num_threads(1)
    end = TrainerEnd(config, LoopThread("trainer"), Clock(), Source)
    end.start()
    pipe.send(end.incarnation)
    while True:
        pipe.send(end.publish(pipe.recv()).failures)
