"""A generator with eval tickets, against a fake replay server and fake engines."""

import json
from pathlib import Path

from async_grpo.config.eval import EvalSection
from async_grpo.engine_api import Path as Route
from async_grpo.tasks.held_out import split_task
from async_grpo.tasks.reverse import ReverseTask
from async_grpo.types import DropReason, RewardOutcome, Ticket, TicketKind, WeightsName
from tests.fakes.generator_world import ScriptedRewards, World

V0 = WeightsName(1, 0)
EVAL = EvalSection(
    every=1, num_prompts=3, num_completions=2, temperature=0.5, max_new_tokens=4,
    held_out_fraction=0.2,
)  # fmt: skip


def world_with_evaluation(tmp_path: Path, rewards: ScriptedRewards | None = None) -> World:
    world = World(tmp_path, group_size=4, rewards=rewards)
    world.config.eval = EVAL
    return world


async def publish(world: World) -> None:
    (engine_id,) = await world.replay.wanting()
    await world.replay.publish("1.0", [engine_id])


def eval_tickets(count: int) -> list[Ticket]:
    return [Ticket(-1 - index, 1, index, TicketKind.EVAL) for index in range(count)]


async def test_held_out_prompts_are_sampled_scored_and_reported(tmp_path):
    async with world_with_evaluation(tmp_path).running() as world:
        await publish(world)
        world.replay.tickets.extend(eval_tickets(3))
        await world.replay.until(lambda: len(world.replay.evaluated_tickets) == 3)
        calls = [call.body for call in world.engines[0].calls if call.path is Route.GENERATE][1:]
    assert world.replay.inserted == []
    assert world.replay.ended == []
    for _, stats, weights_tokens in world.replay.evaluated_tickets:
        assert (stats.num_completions, stats.reward_sum) == (2, 0.0 + 1.0)
        assert weights_tokens == [(V0, stats.num_tokens)]
    assert len(calls) == 3 * 2
    assert {call["sampling_params"]["temperature"] for call in calls} == {0.5}
    assert {call["sampling_params"]["max_new_tokens"] for call in calls} == {4}
    _, held_out = split_task(ReverseTask(seed=0), EVAL, 0)
    assert held_out is not None
    samples = [json.loads(line) for line in world.samples_path.read_text().splitlines()]
    assert {sample["prompt"] for sample in samples} <= {held_out.question(i)[0] for i in range(3)}
    assert {(sample["kind"], sample["outcome"]) for sample in samples} == {("eval", "evaluated")}
    lines = [json.loads(line) for line in world.witness_path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["evaluated"] * 3


async def test_train_tickets_beside_them_keep_their_own_parameters(tmp_path):
    async with world_with_evaluation(tmp_path).running() as world:
        await publish(world)
        world.replay.tickets.extend(eval_tickets(1))
        world.replay.add_tickets(2)
        await world.replay.until(
            lambda: len(world.replay.inserted) == 2 and len(world.replay.evaluated_tickets) == 1
        )
        calls = [call.body for call in world.engines[0].calls if call.path is Route.GENERATE][1:]
    sizes = [call["sampling_params"]["max_new_tokens"] for call in calls]
    assert sorted(sizes) == [4, 4] + [8] * 8


async def test_equal_rewards_are_no_reason_to_drop_an_evaluation(tmp_path):
    rewards = ScriptedRewards([(RewardOutcome.SCORED, 1.0)] * 2)
    async with world_with_evaluation(tmp_path, rewards).running() as world:
        await publish(world)
        world.replay.tickets.extend(eval_tickets(1))
        await world.replay.until(lambda: len(world.replay.evaluated_tickets) == 1)
    assert world.replay.evaluated_tickets[0][1].reward_sum == 2.0


async def test_a_failed_reward_ends_the_eval_ticket_and_is_kept_as_a_sample(tmp_path):
    rewards = ScriptedRewards([(RewardOutcome.SCORED, 1.0), (RewardOutcome.TIMEOUT, float("nan"))])
    async with world_with_evaluation(tmp_path, rewards).running() as world:
        await publish(world)
        world.replay.tickets.extend(eval_tickets(1))
        await world.replay.until(lambda: len(world.replay.ended) == 1)
    assert world.replay.ended[0].reason is DropReason.REWARD_FAILED
    assert world.replay.evaluated_tickets == []
    samples = [json.loads(line) for line in world.samples_path.read_text().splitlines()]
    assert [(s["outcome"], s["reward_outcome"], s["reward"]) for s in samples] == [
        ("reward_failed", "scored", 1.0), ("reward_failed", "timeout", None),
    ]  # fmt: skip
