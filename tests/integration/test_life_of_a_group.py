"""The fifteen stages of docs/architecture.md, in order, on the real parts.

A real replay server on a real socket, a real generator with a real reward pool, a real train step
on a tiny model. Only the engine is scripted, so that every token is sampled when the test says so.
Group 2 is the one that is followed: it is in flight while the weights change.
"""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from async_grpo.algorithms.staleness import is_fresh
from async_grpo.analysis.audit import audit
from async_grpo.config.load import to_yaml
from async_grpo.config.run_directory import RunDirectory
from async_grpo.engine_api import Path as Route
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.witness import WitnessLog
from async_grpo.replay.core.prompt_order import PromptOrder
from async_grpo.replay.generator_client import GeneratorClient
from async_grpo.replay.monitor_client import MonitorClient
from async_grpo.replay_parts import CellPhase
from async_grpo.roles.generator_loops import Generator
from async_grpo.roles.generator_start import Room
from async_grpo.tasks.prompts import PromptSource
from async_grpo.tasks.reverse import ReverseTask
from async_grpo.tasks.reward_pool import ProcessRewardPool
from async_grpo.training.feed import Batch
from async_grpo.training.step import TrainStep
from async_grpo.training.witness import StepWitness
from async_grpo.types import DropReason, InsertOutcome, WeightsName
from tests.fakes.fake_engine import EOS, FakeEngine, Script, weights_of
from tests.fakes.generator_world import FakeHandle, LetterTokenizer
from tests.fakes.replay_harness import (
    STATUS,
    at_address,
    open_update,
    replay_config,
    serving,
    training,
)
from tests.fakes.tiny_policy import tiny_policy

GROUP_SIZE = 4
TASK = ReverseTask(seed=0, length=3)
TOKENIZER = LetterTokenizer()
WRONG = 18
"""An id that is no letter of any answer."""
V0, V1, V2 = WeightsName(1, 0), WeightsName(1, 1), WeightsName(1, 2)


def scripted(request):
    """Member 0 answers right in 4 tokens, except in group 3; the others fail: in groups 0 and 1
    after 3 tokens, later after 8."""
    group_id, _, member = (int(part) for part in request.rid.split("-"))
    if member == 0 and group_id != 3:
        letters = TOKENIZER.decode(request.input_ids).rstrip(">")
        return Script([*TOKENIZER.encode(letters[::-1]), EOS])
    return Script([WRONG] * 2 + [EOS] if group_id < 2 else [WRONG] * 7 + [EOS])


class Publisher:
    """The trainer's side of an update; the fake engine needs no collective."""

    def __init__(self, trainer, engine):
        self._trainer, self._engine = trainer, engine
        self._number = 0

    async def publish(self, weights, *, fresh):
        self._number += 1
        sequence, cell_id, engine_id = await open_update(
            self._trainer, self._number, weights, fresh=fresh
        )
        committed = CellPhase.COMMITTED
        waiting = asyncio.create_task(
            self._trainer.wait_cell(sequence, cell_id, committed, timeout_s=20)
        )
        probe = f"probe-{sequence}-{engine_id}"
        await self._engine.until(lambda: probe in self._engine.running)
        self._engine._advance(self._engine._running[probe], 1)
        assert (await waiting).phases == {engine_id: committed}
        return sequence


@asynccontextmanager
async def generating(config, engine):
    """The real generator over the scripted engine."""
    directory = RunDirectory(Path(config.run.output_dir))
    prompts = PromptSource(TASK, TOKENIZER)
    rewards = ProcessRewardPool(TASK.reward, workers=1, timeout_s=20, unparseable_reward=None)
    client = GeneratorClient(config, name="generator-0", dataset=prompts.dataset())

    async def start_engine(_engine_id):
        return FakeHandle(engine, owned=True)

    with WitnessLog(directory.generator_log("generator-0")) as witness:
        await rewards.start()
        welcome = await client.connect()
        generator = Generator(
            config,
            "generator-0",
            run=welcome.run_token,
            replay=client,
            start_engines=[start_engine],
            make_client=partial(HttpEngineClient, control_timeout_s=5.0),
            prompts=prompts,
            room=Room(config, prompts),
            tokenizer=TOKENIZER,
            rewards=rewards,
            witness=witness,
        )
        running = asyncio.create_task(generator.run())
        try:
            yield client, running
        finally:
            running.cancel()
            await asyncio.wait([running])
            await rewards.close()
            await client.close()


@asynccontextmanager
async def watching(config):
    """A supervisor's view."""
    monitor = MonitorClient(config)
    await monitor.connect()
    try:
        yield monitor
    finally:
        await monitor.close()


async def _draw(trainer, number, version):
    reply = await trainer.draw(number, version)
    while not reply.groups:
        reply = await trainer.draw(number, version)
    groups = [await trainer.fetch(group.group_id, group.attempt) for group in reply.groups]
    return Batch(number, version, reply.groups, groups, reply.generated, time.monotonic())


def _ledger(directory, kind):
    lines = (json.loads(line) for line in directory.ledger.read_text().splitlines())
    return [line for line in lines if line["type"] == kind]


async def _until(monitor, condition):
    """Ask until the counters say so: milliseconds, and nobody notifies a monitor."""
    async with asyncio.timeout(20):
        while not condition(stats := await monitor.stats()):
            pass
    return stats


@pytest.fixture
def config(tmp_path):
    base = replay_config(tmp_path, group_size=GROUP_SIZE, num_tokens=8)
    staleness = replace(base.staleness, max_staleness=2, pipeline_depth=1)
    return replace(base, staleness=staleness)


async def test_life_of_a_group(config, tmp_path):
    directory = RunDirectory(tmp_path)
    directory.config.write_text(to_yaml(config))
    policy = tiny_policy(dtype=torch.float64)
    step = TrainStep(policy, config.algorithm, config.trainer, num_train_steps=2)
    engine = FakeEngine(manual=True)
    engine.script = lambda request: (
        Script([2]) if request.rid.startswith("probe") else scripted(request)
    )
    async with engine, serving(config) as server:
        config = at_address(config, server.address)
        async with (
            training(config) as trainer,
            watching(config) as monitor,
            generating(config, engine) as (client, generator),
        ):
            await trainer.start(0)
            publisher = Publisher(trainer, engine)
            async with asyncio.timeout(20):
                while not (await trainer.draw(1, 0)).wishes:
                    pass
            await publisher.publish(V0, fresh=True)

            # 1. Tickets: as many as the window admits, (D + 1) * P, and no more.
            await engine.until(lambda: len(engine.running) == 4 * GROUP_SIZE)
            stats = await monitor.stats()
            assert (stats.tickets, stats.claimed, stats.live) == (4, 4, V0)

            # 2. Prompts: by the seeded order, tokenized once.
            order = PromptOrder(seed=config.run.seed, num_prompts=len(TASK))
            calls = [c.body for c in engine.calls if c.path is Route.GENERATE][1:]
            by_group = {int(call["rid"].split("-")[0]): call["input_ids"] for call in calls}
            expected = {g: TASK.question(order.prompt_index(g))[0] for g in range(4)}
            assert by_group == {g: TOKENIZER.encode(text) for g, text in expected.items()}

            # 3. Sampled: single requests with ids of their own, every parameter explicit.
            assert len({call["rid"] for call in calls}) == len(calls) == 4 * GROUP_SIZE
            assert {weights_of(call["extra_key"]) for call in calls} == {"1.0"}
            assert all(call["sampling_params"]["n"] == 1 for call in calls)

            # Groups 0 and 1 go ahead and make version 1, while group 2 is in flight.
            await engine.step(4)
            first = await _draw(trainer, 1, 0)
            assert [group.group_id for group in first.groups] == [0, 1]
            with StepWitness(directory.steps) as witness:
                step.apply(first.groups, 0)
                witness.write(1, first, 2)
            await trainer.ack(0, 1, [(g.group_id, g.attempt) for g in first.groups])
            assert (await monitor.stats()).claimed == 2, "trained, but not yet live: no new ticket"
            await publisher.publish(V1, fresh=False)
            await engine.until(lambda: any(rid.startswith("5-") for rid in engine.running))

            # 4. The weights changed midway: the engine's own spans become segments.
            await engine.step(4)
            # 5. Scored, in another process. 6. Group 3 has no signal and ends.
            await _until(monitor, lambda stats: stats.dropped)
            await engine.step(4)
            second = await _draw(trainer, 2, 1)
            group = next(g for g in second.groups if g.group_id == 2)
            right, *others = group.rollouts
            assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 0.0, 0.0]
            assert [(s.weights, s.num_tokens, s.kv_mixed) for s in right.sequences[0].segments] == [
                (V0, 4, False)
            ]
            for rollout in others:
                assert [
                    (s.weights, s.num_tokens, s.kv_mixed) for s in rollout.sequences[0].segments
                ] == [(V0, 4, False), (V1, 4, False)], "retracted"
            (dropped,) = _ledger(directory, "Dropped")
            assert (dropped["group_id"], dropped["reason"]) == (3, DropReason.NO_SIGNAL)
            assert second.generated.dropped == {DropReason.NO_SIGNAL: 1}

            # 7. Encoded: what the trainer decodes is what the engine sampled.
            sequence = others[0].sequences[0]
            assert sequence.token_ids.tolist() == [WRONG] * 7 + [EOS]
            assert sequence.prompt_token_ids.tolist() == by_group[2]
            assert sequence.behavior_logprobs.dtype == "float32"

            # 8. Inserted with an ack; the attempt is over then: sent again, it is fenced.
            answers = [
                line
                for line in map(
                    json.loads, directory.generator_log("generator-0").read_text().splitlines()
                )
                if line["event"] == "answered" and line["group_id"] == 2
            ]
            assert [line["outcome"] for line in answers] == [InsertOutcome.STORED]
            assert await client.insert(group) is InsertOutcome.FENCED

            # 9. Drawn under a lease, oldest version first, within the bound; asking again changes
            # nothing.
            assert 2 in [g.group_id for g in second.leased]
            assert all(is_fresh(1, leased.oldest.policy_version, 2) for leased in second.leased)
            again = await trainer.draw(2, 1)
            assert [g.group_id for g in again.groups] == [g.group_id for g in second.leased]

            # 10.-12. Advantages, the proximal policy (one update: the policy itself), the loss.
            outcome = step.apply(second.groups, 1)
            position = second.groups.index(group)
            advantages = [s.advantage for s in outcome.sequences if s.group == position]
            assert advantages == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], abs=1e-6)
            facts = outcome.tokens
            assert torch.equal(facts.proximal_logprobs, facts.policy_logprobs)
            assert len(outcome.losses) == 1
            with StepWitness(directory.steps) as witness:
                witness.write(1, second, 2)

            # 13. The version grows, the lease is acked, once.
            keys = [(g.group_id, g.attempt) for g in second.groups]
            for _ in range(2):
                await trainer.ack(1, 2, keys)
            stats = await monitor.stats()
            assert (stats.policy_version, stats.trained, stats.live) == (2, 4, V1)
            claimed_before = stats.claimed

            # 14. Published, and live once the engine has committed.
            await publisher.publish(V2, fresh=False)
            await _until(monitor, lambda stats: stats.live == V2)

            # 15. Only now its place is free, and a new group is born under the new weights.
            await engine.until(
                lambda: "1.2" in {weights_of(c.body.get("extra_key", "")) for c in engine.calls}
            )
            assert (await monitor.stats()).claimed > claimed_before

            await trainer.heartbeat([], STATUS)
            await trainer.finish("the life is over")
            assert await generator == "the life is over"
    report = audit(tmp_path)
    assert report.ok, report.to_json()
    assert report.trained == 4
    assert report.max_staleness_trained == 1
