"""What becomes of single requests: aborted, lost, cut short, or sent to a server with whims."""

import pytest

from async_grpo.engine_api import Path as Route
from async_grpo.types import DropReason, Ticket, WeightsName
from tests.fakes.fake_engine import Fault, Script, fake_logprob
from tests.fakes.generator_world import LetterTokenizer, World


async def _started(world, *, size, token=5):
    """An engine that serves, with the members of one group in flight."""
    (engine_id,) = await world.replay.wanting()
    engine = await world.publish_by_hand("1.0", engine_id)
    engine.script = lambda request: Script([token] * request.sampling_params.max_new_tokens)
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


async def test_what_a_request_sampled_until_its_deadline_is_kept_and_continued(tmp_path):
    """Long completions would else be sampled from their start again, and never end."""
    world = World(tmp_path, manual=True, group_size=2)
    world.config.generation.request_timeout_s = 1.0
    async with world.running():
        engine = await _started(world, size=2)
        first, other = engine.running
        await engine.step(3)
        await engine.until(lambda: {f"{first}-1", f"{other}-1"} <= set(engine.running))
        await engine.step(2)
        await engine.until(lambda: {f"{first}-2", f"{other}-2"} <= set(engine.running))
        await engine.step(3)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        sent = {body["rid"]: body for body in _members(engine)}
        sampler = world.generator._sampler
        assert (sampler.num_retries, sampler.num_continued) == (0, 4)
    prompt = sent[first]["input_ids"]
    assert sent[f"{first}-1"]["input_ids"] == [*prompt, 5, 5, 5]
    assert sent[f"{first}-2"]["input_ids"] == [*prompt, 5, 5, 5, 5, 5]
    assert sent[f"{first}-2"]["sampling_params"]["max_new_tokens"] == 3
    for rollout in world.replay.inserted[0].rollouts:
        (sequence,) = rollout.sequences
        assert sequence.token_ids.tolist() == [5] * 8
        assert [segment.num_tokens for segment in sequence.segments] == [8]
        size = sequence.prompt_token_ids.size
        assert sequence.behavior_logprobs.tolist() == pytest.approx(
            [fake_logprob("1.0", size + at, 5) for at in range(8)]
        )


async def test_a_request_whose_abort_is_not_answered_is_given_up(tmp_path):
    """Bounded: the deadline, a while for the abort, then another try."""
    world = World(tmp_path, manual=True, group_size=2)
    world.config.generation.request_timeout_s = 0.3
    async with world.running():
        engine = await _started(world, size=2)
        first = set(engine.running)
        world.generator._sampler.abort_answer_s = 0.3
        engine.deaf = True
        await engine.until(lambda: len(_members(engine)) == 4)
        assert {call.body["rid"] for call in engine.calls if call.path is Route.ABORT} >= first
        await engine.until(lambda: not first & set(engine.running))  # their connections are closed
        engine.deaf = False
        world.config.generation.request_timeout_s = 30.0
        await engine.until(lambda: len(engine.running) == 2)
        await engine.step(8)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        assert world.generator._sampler.num_retries >= 2
        assert world.generator._sampler.num_continued == 0


async def test_a_deadline_in_the_course_of_an_update_waits_for_its_end(tmp_path):
    """A paused server answers an abort only when it goes on."""
    world = World(tmp_path, manual=True, group_size=2)
    world.config.generation.request_timeout_s = 0.3
    async with world.running():
        engine = await _started(world, size=2)
        first, other = engine.running
        await engine.step(3)
        world.generator._sampler.abort_answer_s = 0.3
        engine.deaf = True  # as a paused SGLang is
        (slot,) = world.generator._slots
        slot.engine.begin_update(WeightsName(1, 1))
        await engine.until(lambda: engine.num_calls(Route.ABORT) >= 6)
        assert len(_members(engine)) == 2, "nothing was sampled anew"
        engine.deaf = False
        await engine.until(lambda: not engine.running)
        world.config.generation.request_timeout_s = 30.0
        slot.engine.keep_weights()
        await engine.until(lambda: {f"{first}-1", f"{other}-1"} <= set(engine.running))
        await engine.step(5)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        assert world.generator._sampler.num_retries == 0


async def test_no_request_id_begins_with_that_of_another_member(tmp_path):
    """SGLang aborts every request whose id begins with the one it is told."""
    async with World(tmp_path, manual=True, group_size=12).running() as world:
        engine = await _started(world, size=12)
        rids = list(engine.running)
        assert not any(a != b and b.startswith(a) for a in rids for b in rids)


async def test_b035_ids_are_those_that_were_sampled_whatever_their_text_would_be(tmp_path):
    """Two ids of one letter: the text, tokenized again, would be another completion."""
    tokenizer = LetterTokenizer()
    assert tokenizer.encode(tokenizer.decode([14])) == [5]
    async with World(tmp_path, manual=True, group_size=2).running() as world:
        engine = await _started(world, size=2, token=14)
        first, other = engine.running
        await engine.step(3)
        await engine.abort(first)
        await engine.until(lambda: f"{first}-1" in engine.running)
        await engine.step(8)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        sent = {body["rid"]: body["input_ids"] for body in _members(engine)}
        assert sent[f"{first}-1"] == [*sent[other], 14, 14, 14]
    for rollout in world.replay.inserted[0].rollouts:
        assert rollout.sequences[0].token_ids.tolist() == [14] * 8
    assert world.rewards.texts == [["d" * 8] * 2]


async def test_b031_every_request_asks_for_the_full_distribution(tmp_path):
    """First tries, second ones and what goes on after an abort: servers have their own defaults."""
    full = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "n": 1}
    world = World(tmp_path, manual=True, group_size=2)
    world.config.generation.temperature = 0.7
    async with world.running():
        engine = await _started(world, size=2)
        first, other = engine.running
        await engine.abort(other)
        await engine.until(lambda: f"{other}-1" in engine.running)
        await engine.step(3)
        await engine.abort(first)
        await engine.until(lambda: f"{first}-1" in engine.running)
        await engine.step(8)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
        sent = [body["sampling_params"] for body in _members(engine)]
    assert [{name: params[name] for name in full} for params in sent] == [full] * 4
    for rollout in world.replay.inserted[0].rollouts:
        assert rollout.sequences[0].temperature == 0.7


async def test_b046_the_members_of_a_group_differ_on_a_deterministic_server(tmp_path):
    """Such a server gives every request without a seed the same one. (The fake refuses seeds.)

    Other groups, attempts and runs differ too.
    """
    seeds = []
    for run_seed in (0, 1):
        world = World(tmp_path / str(run_seed), group_size=4, deterministic=True)
        world.config.run.seed = run_seed
        async with world.running():
            (engine_id,) = await world.replay.wanting()
            await world.replay.publish("1.0", [engine_id])
            (engine,) = world.engines
            engine.fail_next(Route.GENERATE, Fault.HANG, times=12)  # refused only when all are here
            world.replay.add_tickets(2)
            world.replay.tickets.append(Ticket(0, 2, prompt_index=0))
            await engine.until(lambda engine=engine: len(_members(engine)) == 12)
            seeds += [body["sampling_params"]["sampling_seed"] for body in _members(engine)]
    assert len(set(seeds)) == 2 * 12
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
