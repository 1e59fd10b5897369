"""Requests in flight when new weights come, in each mode of generation.on_weight_update."""

import pytest

from async_grpo.config.generation import OnWeightUpdate
from async_grpo.engine_api import Path as Route
from async_grpo.engine_api import PauseMode
from async_grpo.replay_parts import CellPhase
from async_grpo.types import Segment, WeightsName
from tests.fakes.fake_engine import Fault, Script, fake_logprob
from tests.fakes.generator_world import FIRST_LETTER_ID, LETTERS, World

V0 = WeightsName(1, 0)
V1 = WeightsName(1, 1)
LAST_PROMPT_ID = FIRST_LETTER_ID + LETTERS.index(">")
TOKENS = [5, 6, 7, 8, 5, 6]


def _continuation(request):
    """The rest of TOKENS, wherever the prompt leaves off; one token after a probe."""
    if LAST_PROMPT_ID not in request.input_ids:
        return Script([5])
    sampled = len(request.input_ids) - request.input_ids.index(LAST_PROMPT_ID) - 1
    return Script(TOKENS[sampled:])


@pytest.mark.parametrize(
    ("setting", "paused_by", "kv_mixed", "num_requests"),
    [
        (OnWeightUpdate.retract, PauseMode.RETRACT, False, 2),
        (OnWeightUpdate.in_place, PauseMode.IN_PLACE, True, 2),
        (OnWeightUpdate.abort, PauseMode.ABORT, False, 4),
        (OnWeightUpdate.auto, PauseMode.RETRACT, False, 2),
    ],
)
async def test_b044_requests_in_flight_outlast_an_update(
    tmp_path, setting, paused_by, kv_mixed, num_requests
):
    options = {"manual": True, "group_size": 2, "on_weight_update": setting}
    async with World(tmp_path, **options).running() as world:
        (engine_id,) = await world.replay.wanting()
        engine = await world.publish_by_hand("1.0", engine_id)
        engine.script = _continuation
        world.replay.add_tickets(1)
        await engine.until(lambda: len(engine.running) == 2)
        before = engine.num_calls(Route.GENERATE)
        await engine.step(2)
        await world.publish_by_hand("1.1", engine_id, fresh=False)
        await engine.until(lambda: len(engine.running) == 2)
        await engine.step(4)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
    (group,) = world.replay.inserted
    for rollout in group.rollouts:
        (sequence,) = rollout.sequences
        assert sequence.token_ids.tolist() == TOKENS
        first, second = sequence.segments
        assert (first.weights, first.num_tokens, first.kv_mixed) == (V0, 2, False)
        assert (second.weights, second.num_tokens, second.kv_mixed) == (V1, 4, kv_mixed)
        expected = [
            fake_logprob(weights, sequence.prompt_token_ids.size + at, token)
            for at, (weights, token) in enumerate(
                zip(["1.0"] * 2 + ["1.1"] * 4, TOKENS, strict=True)
            )
        ]
        assert sequence.behavior_logprobs.tolist() == pytest.approx(expected)
    assert group.oldest_weights() == V0
    assert engine.pauses[-1] is paused_by
    assert engine.num_flushes == (0 if kv_mixed else 2), "at each update, of which there are two"
    calls = [call.body for call in engine.calls if call.path is Route.GENERATE][before - 2 :]
    sent = [call for call in calls if not call["rid"].startswith("probe")]
    assert len(sent) == num_requests == len({call["rid"] for call in sent})
    for again in sent[2:]:
        assert again["extra_key"] == "run:gen/0:1.1"
        assert again["input_ids"][-2:] == TOKENS[:2]
        assert again["sampling_params"]["max_new_tokens"] == 6
    paths = [call.path for call in engine.calls]
    assert paths.count(Route.INIT_GROUP) == 1
    assert [update.weight_version for update in engine.updates] == [
        None, "run:gen/0:1.0", None, "run:gen/0:1.1",
    ]  # fmt: skip
    assert not any(update.flush_cache for update in engine.updates)
    assert world.generator._sampler.num_retries == 0


async def test_a_request_may_be_aborted_by_many_updates(tmp_path):
    """More often than a failing request is tried again: these are no failures."""
    options = {"manual": True, "group_size": 2, "on_weight_update": OnWeightUpdate.abort}
    async with World(tmp_path, **options).running() as world:
        (engine_id,) = await world.replay.wanting()
        engine = await world.publish_by_hand("1.0", engine_id)
        engine.script = lambda request: Script([5] * request.sampling_params.max_new_tokens)
        world.replay.add_tickets(1)
        for version in range(1, 9):
            await engine.until(lambda: len(engine.running) == 2)
            if version % 2:  # every other time there is no token yet
                await engine.step(1)
            await world.publish_by_hand(f"1.{version}", engine_id, fresh=False)
        await engine.until(lambda: len(engine.running) == 2)
        await engine.step(4)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
    for rollout in world.replay.inserted[0].rollouts:
        (sequence,) = rollout.sequences
        found = [
            (segment.weights.policy_version, segment.num_tokens) for segment in sequence.segments
        ]
        assert found == [(0, 1), (2, 1), (4, 1), (6, 1), (8, 4)]
        assert not any(segment.kv_mixed for segment in sequence.segments)


async def test_a_flush_that_is_refused_is_told_by_the_segments(tmp_path):
    options = {"manual": True, "group_size": 2, "on_weight_update": OnWeightUpdate.retract}
    async with World(tmp_path, **options).running() as world:
        (engine_id,) = await world.replay.wanting()
        engine = await world.publish_by_hand("1.0", engine_id)
        engine.script = _continuation
        world.replay.add_tickets(1)
        await engine.until(lambda: len(engine.running) == 2)
        await engine.step(2)
        engine.fail_next(Route.FLUSH_CACHE, Fault.REFUSE)
        await world.publish_by_hand("1.1", engine_id, fresh=False)
        await engine.step(4)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
    segments = world.replay.inserted[0].rollouts[0].sequences[0].segments
    assert [segment.kv_mixed for segment in segments] == [False, True]


@pytest.mark.parametrize("setting", list(OnWeightUpdate))
async def test_an_update_that_is_aborted_before_go_costs_no_token(tmp_path, setting):
    options = {"manual": True, "group_size": 2, "on_weight_update": setting}
    async with World(tmp_path, **options).running() as world:
        (engine_id,) = await world.replay.wanting()
        engine = await world.publish_by_hand("1.0", engine_id)
        engine.script = _continuation
        world.replay.add_tickets(1)
        await engine.until(lambda: len(engine.running) == 2)
        await engine.step(2)
        sequence = await world.replay.order("1.1", [engine_id])
        await world.replay.phase_of(sequence, engine_id, CellPhase.BEGUN)
        await world.replay.abort(sequence, "another engine failed")
        await world.replay.phase_of(sequence, engine_id, CellPhase.FAILED)
        await engine.until(lambda: len(engine.running) == 2)
        await engine.step(4)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
    for rollout in world.replay.inserted[0].rollouts:
        (completion,) = rollout.sequences
        assert completion.token_ids.tolist() == TOKENS
        assert completion.segments == [Segment(weights=V0, num_tokens=6)]
