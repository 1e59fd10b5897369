"""The whole generator against a fake replay server and fake engines."""

import json
import math

import pytest

from async_grpo.engine_api import Checksums
from async_grpo.engine_api import Path as Route
from async_grpo.errors import ConfigError, GenerationError
from async_grpo.replay_parts import CellPhase
from async_grpo.types import DropReason, InsertOutcome, RewardOutcome, WeightsName
from tests.fakes.fake_engine import PROBE_IDS, Fault, probe_of
from tests.fakes.generator_world import ScriptedRewards, World

V0 = WeightsName(1, 0)
WRONG_PROBE = probe_of(PROBE_IDS, [-9.0] * 3, 1e-3)


async def test_groups_flow(tmp_path):
    async with World(tmp_path).running() as world:
        (engine_id,) = await world.replay.wanting()
        assert await world.replay.publish("1.0", [engine_id]) == [CellPhase.COMMITTED]
        world.replay.add_tickets(5)
        await world.replay.until(lambda: len(world.replay.inserted) == 5)
        group = world.replay.inserted[0]
        assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, 2.0, 3.0]
        assert group.generator == "gen"
        assert group.engine_id == engine_id
        assert group.oldest_weights() == V0
        assert 0 <= group.sampled_ago_s <= group.started_s
        calls = [call.body for call in world.engines[0].calls if call.path is Route.GENERATE][1:]
        assert {call["extra_key"] for call in calls} == {"run:gen/0:1.0"}
        assert len({call["rid"] for call in calls}) == 20
        params = calls[0]["sampling_params"]
        assert (params["top_p"], params["top_k"], params["min_p"], params["n"]) == (1.0, -1, 0, 1)
        assert params["sampling_seed"] is None
        await world.replay.until(lambda: world.replay.claims == [])
    lines = [json.loads(line) for line in world.witness_path.read_text().splitlines()]
    assert [line["event"] for line in lines].count("sent") == 5
    answers = [line for line in lines if line["event"] == "answered"]
    assert {line["outcome"] for line in answers} == {"stored"}
    assert {line["oldest"] for line in answers} == {"1.0"}
    assert {line["group_id"]: line["num_tokens"] for line in answers} == {
        group.group_id: group.num_tokens for group in world.replay.inserted
    }


async def test_nothing_is_sampled_before_the_first_committed_sync(tmp_path):
    async with World(tmp_path).running() as world:
        (engine_id,) = await world.replay.wanting()
        world.replay.add_tickets(1)
        sequence = await world.replay.order("1.0", [engine_id])
        await world.replay.phase_of(sequence, engine_id, CellPhase.BEGUN)
        assert world.engines[0].num_calls(Route.GENERATE) == 0
        await world.replay.go(sequence)
        await world.replay.phase_of(sequence, engine_id, CellPhase.COMMITTED)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)


async def test_a_killed_engine_costs_no_group(tmp_path):
    async with World(tmp_path, num_engines=2, manual=True).running() as world:
        ids = await world.replay.wanting(2)
        for engine_id in ids:
            await world.publish_by_hand("1.0", engine_id)
        world.replay.add_tickets(1)
        victim = next(e for e in await _engines_with_requests(world) if e.running)
        await victim.step(1)
        other = next(engine for engine in world.engines if engine is not victim)
        await world.handles[world.engines.index(victim)].kill()
        await other.until(lambda: len(other.running) == 4)
        await other.step(8)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        await world.replay.wanting()
        assert len(world.engines) == 3, "the dead one was started again"
        restarted = [engine.engine_id for engine in world.replay.engines if engine.wants_sync]
        assert not set(restarted) & set(ids), "under another id"
    assert world.replay.ended == []


async def test_a_generator_whose_engines_all_die_fails(tmp_path):
    async with World(tmp_path, max_restarts=0).running() as world:
        await world.replay.wanting()
        await world.handles[0].kill()
        with pytest.raises(GenerationError, match=r"no engine is left.*the fake process ended"):
            await world.task
        world.failure_expected = True


async def test_engines_that_end_because_of_their_configuration_end_the_generator(tmp_path):
    async with World(tmp_path, max_restarts=9).running() as world:
        await world.replay.wanting()
        world.handles[0].misconfigured = True
        await world.handles[0].kill()
        with pytest.raises(ConfigError, match=r"no engine is left; gen/0#.*no such flag"):
            await world.task
        world.failure_expected = True
    assert len(world.engines) == 1


async def test_an_engine_without_room_for_the_longest_prompt_is_refused(tmp_path):
    async with World(tmp_path, context_length=12).running() as world:
        with pytest.raises(ConfigError, match=r"context of engine gen/0#.* \(12\) is below the"):
            await world.task
        world.failure_expected = True
    assert world.engines[0].num_calls(Route.GENERATE) == 0
    assert world.handles[0].ended


async def test_a_failed_probe_lets_nothing_through(tmp_path):
    async with World(tmp_path, manual=True, group_size=2).running() as world:
        (engine_id,) = await world.replay.wanting()
        engine = await world.publish_by_hand("1.0", engine_id)
        world.replay.add_tickets(1)
        await engine.until(lambda: len(engine.running) == 2)
        await engine.step(1)
        sequence = await world.replay.order("1.1", [engine_id], probe=WRONG_PROBE, fresh=False)
        await world.replay.phase_of(sequence, engine_id, CellPhase.BEGUN)
        await world.replay.go(sequence)
        # the probe runs beside the frozen members; these finish before it, under the new weights
        await engine.until(lambda: len(engine.running) == 3)
        members = engine.running[:2]
        await engine.step(8)
        await engine.until(lambda: not set(members) & set(engine.running))
        await world.replay.phase_of(sequence, engine_id, CellPhase.FAILED)
        assert world.replay.inserted == []
        await world.replay.changed()
        (restarted,) = await world.replay.wanting()
        assert restarted != engine_id
        fresh_engine = await world.publish_by_hand("1.2", restarted)
        await fresh_engine.until(lambda: len(fresh_engine.running) == 2)
        await fresh_engine.step(8)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
    (group,) = world.replay.inserted
    assert group.oldest_weights() == WeightsName(1, 2)


async def test_weights_that_never_arrived_are_noticed(tmp_path):
    async with World(tmp_path).running() as world:
        (engine_id,) = await world.replay.wanting()
        world.engines[0].fail_next(Route.UPDATE_FROM_DISTRIBUTED, Fault.NOT_LOADED, times=2)
        assert await world.replay.publish("1.0", [engine_id]) == [CellPhase.FAILED]
        assert "probe" in world.replay.phases[-1][3]


async def test_an_update_that_is_aborted_before_go_leaves_the_engine_as_it_was(tmp_path):
    async with World(tmp_path).running() as world:
        (engine_id,) = await world.replay.wanting()
        await world.replay.publish("1.0", [engine_id])
        sequence = await world.replay.order("1.1", [engine_id])
        await world.replay.phase_of(sequence, engine_id, CellPhase.BEGUN)
        await world.replay.abort(sequence, "another engine failed")
        await world.replay.phase_of(sequence, engine_id, CellPhase.FAILED)
        world.replay.add_tickets(1)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        assert not world.engines[0].session_open
        assert len(world.engines) == 1
    assert world.replay.inserted[0].oldest_weights() == V0


async def test_an_attached_engine_is_quarantined_and_taken_back(tmp_path):
    async with World(tmp_path, owned=False).running() as world:
        (engine_id,) = await world.replay.wanting()
        world.engines[0].fail_next(Route.UPDATE_FROM_DISTRIBUTED, Fault.REFUSE, times=2)
        assert await world.replay.publish("1.0", [engine_id]) == [CellPhase.FAILED]
        await world.replay.until(
            lambda: [e for e in world.replay.engines if e.wants_sync and e.engine_id != engine_id]
        )
        (again,) = await world.replay.wanting()
        assert len(world.engines) == 1
        assert not world.engines[0].session_open, "left open by the failed update"
        assert await world.replay.publish("1.1", [again]) == [CellPhase.COMMITTED]
        world.replay.add_tickets(1)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)


async def test_engine_faults_are_retried_and_never_trained(tmp_path):
    async with World(tmp_path).running() as world:
        (engine_id,) = await world.replay.wanting()
        await world.replay.publish("1.0", [engine_id])
        world.engines[0].fail_next(Route.GENERATE, Fault.STATUS_500, times=2)
        world.replay.add_tickets(1)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        world.engines[0].fail_next(Route.GENERATE, Fault.SHORT_LOGPROBS)
        world.replay.add_tickets(1)
        await world.replay.until(lambda: len(world.replay.ended) == 1)
    assert world.replay.ended[0].reason is DropReason.GENERATION_FAILED
    assert len(world.replay.inserted) == 1


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([(RewardOutcome.SCORED, 1.0)] * 4, DropReason.NO_SIGNAL),
        (
            [(RewardOutcome.SCORED, 1.0)] * 3 + [(RewardOutcome.ERROR, math.nan)],
            DropReason.REWARD_FAILED,
        ),
        (
            [(RewardOutcome.SCORED, 1.0)] * 3 + [(RewardOutcome.TIMEOUT, math.nan)],
            DropReason.REWARD_FAILED,
        ),
        (
            [(RewardOutcome.SCORED, 1.0)] * 3 + [(RewardOutcome.UNPARSEABLE, math.nan)],
            DropReason.REWARD_FAILED,
        ),
    ],
)
async def test_groups_without_a_signal_or_a_reward_end(tmp_path, scores, reason):
    async with World(tmp_path, rewards=ScriptedRewards(scores)).running() as world:
        (engine_id,) = await world.replay.wanting()
        await world.replay.publish("1.0", [engine_id])
        world.replay.add_tickets(1)
        await world.replay.until(lambda: len(world.replay.ended) == 1)
    (ended,) = world.replay.ended
    assert ended.reason is reason
    assert ended.stats.num_tokens > 0
    expected = (4, 4.0) if reason is DropReason.NO_SIGNAL else (0, 0.0)
    assert (ended.stats.num_completions, ended.stats.reward_sum) == expected
    assert world.replay.inserted == []


async def test_a_group_that_is_over_at_the_server_is_aborted_at_the_engine(tmp_path):
    async with World(tmp_path, manual=True).running() as world:
        (engine_id,) = await world.replay.wanting()
        engine = await world.publish_by_hand("1.0", engine_id)
        world.replay.add_tickets(1)
        await engine.until(lambda: len(engine.running) == 4)
        await world.replay.cancel((0, 1))
        await engine.until(lambda: not engine.running)
        await engine.called(Route.ABORT, 4)
        await world.replay.until(lambda: world.replay.status.metrics["claims_lost"] == 1)
        assert world.replay.claims == []
    assert world.replay.ended == world.replay.inserted == []


async def test_a_group_past_its_deadline_is_given_up(tmp_path):
    async with World(tmp_path, manual=True, group_timeout_s=0.5).running() as world:
        (engine_id,) = await world.replay.wanting()
        engine = await world.publish_by_hand("1.0", engine_id)
        world.replay.add_tickets(1)
        await engine.until(lambda: len(engine.running) == 4)
        await engine.called(Route.ABORT, 4)
        await world.replay.until(lambda: world.replay.status.metrics["claims_lost"] == 1)
        # what was given up holds no slot
        world.replay.add_tickets(1)
        await engine.until(lambda: len(engine.running) == 4)
        await engine.step(8)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
    assert world.replay.ended == []


async def test_a_trainer_that_never_says_go_costs_the_update_only(tmp_path):
    async with World(tmp_path, weights_timeout_s=0.3).running() as world:
        (engine_id,) = await world.replay.wanting()
        await world.replay.publish("1.0", [engine_id])
        sequence = await world.replay.order("1.1", [engine_id])
        await world.replay.phase_of(sequence, engine_id, CellPhase.FAILED)
        world.replay.add_tickets(1)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
    assert world.replay.inserted[0].oldest_weights() == V0
    assert len(world.engines) == 1


async def test_a_trainer_that_gives_up_after_go_costs_the_engine(tmp_path):
    async with World(tmp_path, weights_timeout_s=30.0).running() as world:
        (engine_id,) = await world.replay.wanting()
        world.engines[0].fail_next(Route.UPDATE_FROM_DISTRIBUTED, Fault.HANG)
        sequence = await world.replay.order("1.0", [engine_id])
        await world.replay.phase_of(sequence, engine_id, CellPhase.BEGUN)
        await world.replay.go(sequence)
        await world.engines[0].called(Route.UPDATE_FROM_DISTRIBUTED)
        await world.replay.abort(sequence, "the broadcast failed")
        await world.replay.phase_of(sequence, engine_id, CellPhase.FAILED)
        await world.replay.until(lambda: len(world.engines) == 2)


async def test_an_order_for_an_engine_that_has_ended_fails_at_once(tmp_path):
    async with World(tmp_path).running() as world:
        await world.replay.wanting()
        sequence = await world.replay.order("1.0", ["gen/0#gone"])
        await world.replay.phase_of(sequence, "gen/0#gone", CellPhase.FAILED)


async def test_an_engine_whose_bytes_differ_from_its_neighbors_is_not_committed(tmp_path):
    async with World(tmp_path, num_engines=2).running() as world:
        ids = await world.replay.wanting(2)
        world.engines[1].checksums = _other_checksums
        ends = await world.replay.publish("1.0", ids)
        assert sorted(ends) == [CellPhase.COMMITTED, CellPhase.FAILED]
        assert "checksum" in world.replay.phases[-1][3]


async def _other_checksums():
    return Checksums(total="another", tensors={})


async def test_a_full_engine_claims_no_more_than_fills_its_slots(tmp_path):
    async with World(tmp_path, manual=True, slots=9).running() as world:
        (engine_id,) = await world.replay.wanting()
        engine = await world.publish_by_hand("1.0", engine_id)
        world.replay.add_tickets(5)
        await engine.until(lambda: len(engine.running) == 8)
        assert len(world.replay.claimed) == 2, "8 slots for requests, one for the probe"
        await engine.step(8)
        await world.replay.until(lambda: len(world.replay.claimed) >= 4)


async def test_a_blocked_insert_is_accounted_as_blocked(tmp_path):
    async with World(tmp_path).running() as world:
        (engine_id,) = await world.replay.wanting()
        await world.replay.publish("1.0", [engine_id])
        world.replay.room.clear()
        world.replay.add_tickets(1)
        await world.replay.until(lambda: world.replay.status.state == "blocked")
        assert world.replay.claims == [(0, 1)]
        world.replay.room.set()
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        await world.replay.until(lambda: world.replay.status.state == "waiting")
        assert world.replay.status.metrics["groups"] == 1
        assert set(world.replay.status.seconds) >= {"starting", "syncing", "blocked", "waiting"}


async def test_a_fenced_insert_ends_the_group_quietly(tmp_path):
    async with World(tmp_path).running() as world:
        world.replay.insert_outcome = InsertOutcome.FENCED
        (engine_id,) = await world.replay.wanting()
        await world.replay.publish("1.0", [engine_id])
        world.replay.add_tickets(1)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        await world.replay.until(lambda: world.replay.claims == [])
    assert world.replay.ended == []


async def test_the_end_of_the_run_stops_the_generator(tmp_path):
    async with World(tmp_path, manual=True).running() as world:
        (engine_id,) = await world.replay.wanting()
        engine = await world.publish_by_hand("1.0", engine_id)
        world.replay.add_tickets(1)
        await engine.until(lambda: len(engine.running) == 4)
        await world.replay.stop("all steps are done")
        assert await world.task == "all steps are done"
    assert world.replay.inserted == world.replay.ended == []


async def _engines_with_requests(world):
    await world.replay.until(lambda: any(engine.running for engine in world.engines))
    return world.engines
