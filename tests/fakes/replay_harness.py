"""A replay server in this event loop, and what it takes to get a first ticket out of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from async_grpo.config.generation import GenerationSection
from async_grpo.config.policy import PolicySection
from async_grpo.config.replay import ReplaySection
from async_grpo.config.run import RunSection
from async_grpo.config.schema import Config
from async_grpo.config.staleness import StalenessSection
from async_grpo.config.task import TaskSection
from async_grpo.config.weights import WeightsSection
from async_grpo.replay.generator_client import GeneratorClient
from async_grpo.replay.server import ReplayServer
from async_grpo.replay.trainer_client import TrainerClient
from async_grpo.replay_parts import (
    BucketSpec,
    CellPhase,
    Dataset,
    EngineState,
    EngineStatus,
    Rendezvous,
    RoleStatus,
)
from async_grpo.types import (
    Completion,
    FinishReason,
    Rollout,
    RolloutGroup,
    Segment,
    Ticket,
    WeightsName,
)
from tests.fakes.fake_engine import fake_probe

DATASET = Dataset(fingerprint="fixed", num_prompts=100)
STATUS = RoleStatus(state="testing")
ENGINE_ID = "g0/0#1"


def replay_config(
    root: Path, *, group_size: int = 2, num_tokens: int = 8, **replay: object
) -> Config:
    """A small run: 2 groups per step, pipeline depth 1."""
    section = ReplaySection(
        address="tcp://127.0.0.1:0",
        groups_per_step=2,
        request_timeout_s=5.0,
        heartbeat_s=0.5,
        peer_timeout_s=20.0,
    )
    return Config(
        run=RunSection(output_dir=str(root), num_train_steps=50, no_progress_timeout_s=30.0),
        policy=PolicySection(model="none"),
        task=TaskSection(name="reverse"),
        generation=GenerationSection(group_size=group_size, max_new_tokens=num_tokens),
        staleness=StalenessSection(max_staleness=2),
        replay=replace(section, **replay),
        weights=WeightsSection(),
    )


def at_address(config: Config, address: str) -> Config:
    """The same run at the address that the server was given by the system."""
    return replace(config, replay=replace(config.replay, address=address))


def group_for(
    ticket: Ticket, weights: WeightsName, *, group_size: int = 2, num_tokens: int = 8
) -> RolloutGroup:
    """A well-formed group; its content follows from the ticket."""
    generator = np.random.default_rng(ticket.group_id)

    def completion() -> Completion:
        return Completion(
            prompt_token_ids=np.arange(3, dtype=np.int32),
            token_ids=generator.integers(0, 1000, num_tokens, dtype=np.int32),
            behavior_logprobs=-generator.random(num_tokens, dtype=np.float32),
            segments=[Segment(weights, num_tokens)],
            finish_reason=FinishReason.STOP,
            temperature=1.0,
        )

    rollouts = [Rollout([completion()], float(position)) for position in range(group_size)]
    return RolloutGroup(ticket.group_id, ticket.attempt, ticket.prompt_index, rollouts)


def engine_status(weights: WeightsName | None, publish_sequence: int = 0) -> EngineStatus:
    """The one engine of generator g0."""
    return EngineStatus(
        engine_id=ENGINE_ID,
        state=EngineState.SERVING,
        weights=weights,
        publish_sequence=publish_sequence,
        wants_sync=weights is None,
    )


async def claimed(generator: GeneratorClient) -> Ticket:
    """A ticket, which there must be."""
    ticket = await generator.claim()
    assert ticket is not None
    return ticket


async def open_update(
    trainer: TrainerClient, number: int, weights: WeightsName, *, fresh: bool = True
) -> tuple[int, int, str]:
    """Announce to the only engine and open its cell; no collective follows.

    Returns the publish sequence, the cell and the engine.
    """
    announced = await trainer.announce(
        number,
        weights,
        wished_only=False,
        plan_hash="plan",
        buckets=[BucketSpec(names=["w"], dtypes=["float32"], shapes=[[1]])],
        probe=fake_probe(str(weights)),
        digests={},
    )
    sequence = announced.publish_sequence
    (cell,) = announced.cells
    meeting = Rendezvous(
        group_name="g", host="127.0.0.1", port=1, world_size=2, backend="gloo", fresh=fresh
    )
    await trainer.open_cell(sequence, cell.cell_id, meeting)
    (engine,) = cell.engines
    return sequence, cell.cell_id, engine.engine_id


async def publish(
    trainer: TrainerClient, generator: GeneratorClient, number: int, weights: WeightsName
) -> int:
    """One whole update of the one engine; both ends speak the protocol. Returns its sequence."""
    sequence, cell_id, engine_id = await open_update(trainer, number, weights)
    assert (await generator.watch(0)).orders[0].publish_sequence == sequence
    for phase in (CellPhase.BEGUN, CellPhase.COMMITTED):
        await generator.report_phase(sequence, cell_id, engine_id, phase, "")
        reached = await trainer.wait_cell(sequence, cell_id, phase, timeout_s=10)
        assert reached.phases == {ENGINE_ID: phase}
    return sequence


async def go_live(trainer: TrainerClient, generator: GeneratorClient) -> WeightsName:
    """Start the trainer at version 0 and bring its weights to the generator's engine."""
    started = await trainer.start(0)
    weights = WeightsName(started.incarnation, 0)
    await generator.heartbeat([engine_status(None)], [], STATUS)
    sequence = await publish(trainer, generator, 1, weights)
    await generator.heartbeat([engine_status(weights, sequence)], [], STATUS)
    return weights


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[ReplayServer]:
    """A server that serves until the block ends; its own failure is raised."""
    server = ReplayServer(config)
    task = asyncio.create_task(server.serve())
    try:
        yield server
    finally:
        server.stop("the test is over")
        try:
            await task
        finally:
            server.close()


@asynccontextmanager
async def connected(config: Config, name: str = "g0") -> AsyncIterator[GeneratorClient]:
    """A generator's client."""
    client = GeneratorClient(config, name=name, dataset=DATASET)
    try:
        await client.connect()
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def training(config: Config, name: str = "trainer") -> AsyncIterator[TrainerClient]:
    """A trainer's client."""
    client = TrainerClient(config, name=name)
    try:
        await client.connect()
        yield client
    finally:
        await client.close()
