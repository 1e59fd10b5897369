"""What becomes of single requests: aborted, lost, cut short, or sent to a server with whims."""

import pytest

from async_grpo.engine_api import Path as Route
from async_grpo.types import DropReason
from tests.fakes.fake_engine import Script
from tests.fakes.generator_world import World


async def _started(world, *, size):
    """An engine that serves, with the members of one group in flight."""
    (engine_id,) = await world.replay.wanting()
    engine = await world.publish_by_hand("1.0", engine_id)
    engine.script = lambda request: Script([5] * request.sampling_params.max_new_tokens)
    world.replay.add_tickets(1)
    await engine.until(lambda: len(engine.running) == size)
    return engine


def _members(engine):
    bodies = [call.body for call in engine.calls if call.path is Route.GENERATE]
    return [body for body in bodies if not body["rid"].startswith("probe")]


@pytest.mark.parametrize("num_tokens", [0, 5])
async def test_b043_an_aborted_completion_is_never_scored_as_a_whole_one(tmp_path, num_tokens):
    """Row 8: an abort in the waiting queue is empty: sampled again. A partial one is continued."""
    async with World(tmp_path, manual=True, group_size=2).running() as world:
        engine = await _started(world, size=2)
        first, other = engine.running
        await engine.step(num_tokens)
        await engine.abort(first)
        again = f"{first}-1"
        await engine.until(lambda: again in engine.running)
        assert world.rewards.texts == []
        await engine.step(8)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        sent = {body["rid"]: body for body in _members(engine)}
        assert sent.keys() == {first, other, again}
        assert sent[again]["input_ids"] == sent[first]["input_ids"] + [5] * num_tokens
        assert sent[again]["sampling_params"]["max_new_tokens"] == 8 - num_tokens
        sampler = world.generator._sampler
        assert (sampler.num_retries, sampler.num_continued) == ((1, 0), (0, 1))[num_tokens > 0]
    for rollout in world.replay.inserted[0].rollouts:
        assert rollout.sequences[0].token_ids.tolist() == [5] * 8
    assert len(world.rewards.texts) == 1


async def test_a_request_that_is_not_answered_in_time_is_aborted_and_sampled_elsewhere(tmp_path):
    """What is sent again has an id of its own: nobody knows what became of the first."""
    world = World(tmp_path, manual=True, group_size=2)
    world.config.generation.request_timeout_s = 0.3
    async with world.running():
        engine = await _started(world, size=2)
        first = set(engine.running)
        await engine.until(lambda: len(_members(engine)) == 4)
        await engine.until(lambda: not first & set(engine.running))
        aborted = {call.body["rid"] for call in engine.calls if call.path is Route.ABORT}
        assert first <= aborted
        world.config.generation.request_timeout_s = 30.0
        await engine.until(lambda: len(engine.running) == 2)
        await engine.step(8)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        rids = [body["rid"] for body in _members(engine)]
        assert len(set(rids)) == len(rids)


async def test_b046_the_members_of_a_group_differ_on_a_deterministic_server(tmp_path):
    """Such a server gives every request without a seed the same one. (The fake refuses seeds.)"""
    async with World(tmp_path, group_size=4, deterministic=True).running() as world:
        (engine_id,) = await world.replay.wanting()
        await world.replay.publish("1.0", [engine_id])
        world.replay.add_tickets(1)
        (engine,) = world.engines
        await engine.until(lambda: len(_members(engine)) == 4)
        seeds = [body["sampling_params"]["sampling_seed"] for body in _members(engine)]
        assert len(set(seeds)) == 4
        assert all(isinstance(seed, int) for seed in seeds)


async def test_a_server_that_cuts_prompts_is_not_believed(tmp_path):
    async with World(tmp_path, group_size=2).running() as world:
        (engine_id,) = await world.replay.wanting()
        await world.replay.publish("1.0", [engine_id])
        engine = world.engines[0]
        whole = engine.generate

        async def cut(request):
            reply = await whole(request)
            reply["meta_info"]["prompt_tokens"] -= 1
            return reply

        engine.generate = cut
        world.replay.add_tickets(1)
        await world.replay.until(lambda: len(world.replay.ended) == 1)
    assert world.replay.ended[0].reason is DropReason.GENERATION_FAILED
    assert "must not truncate prompts" in world.replay.ended[0].detail
    assert world.replay.inserted == []
