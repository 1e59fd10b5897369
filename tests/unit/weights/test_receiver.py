import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from async_grpo.engine.admission import RequestRefused
from async_grpo.engine_api import NOT_RECEIVED, PauseMode
from async_grpo.engine_api import Path as Route
from async_grpo.errors import WeightSyncError
from async_grpo.generation.client import HttpEngineClient
from async_grpo.replay_parts import BucketSpec, Probe, ProbeIds, Rendezvous, UpdateOrder
from async_grpo.types import WeightsName
from async_grpo.weights.receiver import WeightReceiver, was_refused
from tests.fakes.fake_engine import FakeEngine, Fault, fake_prompt_logprobs, probe_of

IDS = [3, 4, 5]
RENDEZVOUS = Rendezvous(
    group_name="g2", host="127.0.0.1", port=9, world_size=3, backend="gloo", fresh=True
)

SERVED = "run:gen/0:1.3"


def order(**changes):
    bucket = BucketSpec(names=["a", "b"], dtypes=["float32"] * 2, shapes=[[2], [1]])
    values = UpdateOrder(
        publish_sequence=7,
        weights=WeightsName(1, 3),
        cell_id=0,
        engine_ids=["e"],
        ranks=[2],
        buckets=[bucket] * 3,
        probe=probe_of(IDS, fake_prompt_logprobs("1.3", IDS), 1e-3),
        digests={},
    )
    return msgspec.structs.replace(values, **changes)


@asynccontextmanager
async def receiving(*, timeout_s=20.0, control_s=20.0, mode=PauseMode.IN_PLACE, **changes):
    async with FakeEngine() as engine:
        client = HttpEngineClient(engine.url, control_timeout_s=control_s, vocab_size=64)
        receiver = WeightReceiver(
            client,
            engine_id="e",
            order=order(**changes),
            rank_offset=2,
            mode=mode,
            served_name=SERVED,
            timeout_s=timeout_s,
        )
        try:
            yield engine, receiver
        finally:
            await client.close()


async def whole_update(receiver, rendezvous=RENDEZVOUS, previous_group=""):
    await receiver.begin()
    await receiver.join(rendezvous, previous_group)
    await receiver.receive(rendezvous)
    received = await receiver.finish()
    await receiver.resume()
    await receiver.probe(None)
    return received


async def test_the_calls_of_an_update_in_order():
    async with receiving() as (engine, receiver):
        received = await whole_update(receiver)
        assert received.checksums.total == await engine.checksum()
        assert received.kv_kept
        assert engine.pauses == [PauseMode.IN_PLACE]
        assert [call.path for call in engine.calls] == [
            Route.PAUSE, Route.BEGIN_UPDATE, Route.INIT_GROUP,
            *[Route.UPDATE_FROM_DISTRIBUTED] * 3,
            Route.END_UPDATE, Route.MODEL_INFO, Route.WEIGHTS_CHECKER, Route.CONTINUE,
            Route.GENERATE,
        ]  # fmt: skip
        assert engine.groups["g2"].rank_offset == 2
        assert engine.groups["g2"].world_size == 3
        assert [update.weight_version for update in engine.updates] == [None, None, SERVED]
        assert {update.flush_cache for update in engine.updates} == {False}
        probe = engine.calls[-1].body
        assert probe["extra_key"] == f"probe-{SERVED}"
        assert probe["logprob_start_len"] == 0
        assert probe["sampling_params"]["temperature"] == 1.0


async def test_b081_the_session_is_opened_when_the_pause_is_answered():
    """Row 4: sent at once, the update would wait for the requests that the pause is to stop."""
    async with receiving() as (engine, receiver):
        engine.fail_next(Route.PAUSE, Fault.HANG)
        beginning = asyncio.create_task(receiver.begin())
        await engine.called(Route.PAUSE)
        await receiver._client.model_info()  # a call that was sent beside it would be here by now
        assert engine.num_calls(Route.BEGIN_UPDATE) == 0
        engine.release_hanging()
        await beginning
        assert engine.session_open


async def test_a_server_without_a_weights_checker_is_updated_and_proven_by_the_probe():
    async with receiving() as (engine, receiver):
        engine.missing = {Route.WEIGHTS_CHECKER}
        await receiver.check_names()
        received = await whole_update(receiver)
        assert received.checksums is None
        assert engine.num_calls(Route.GENERATE) == 1


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
async def test_cached_kv_is_dropped_while_paused_unless_it_is_kept(mode):
    async with receiving(mode=mode) as (engine, receiver):
        received = await whole_update(receiver)
        assert not received.kv_kept
        calls = [call.path for call in engine.calls]
        assert calls.index(Route.END_UPDATE) < calls.index(Route.FLUSH_CACHE)
        assert calls.index(Route.FLUSH_CACHE) < calls.index(Route.CONTINUE)
        assert engine.pauses == [mode]


async def test_a_refused_flush_is_told_and_a_lost_one_fails():
    async with receiving(mode=PauseMode.RETRACT) as (engine, receiver):
        engine.fail_next(Route.FLUSH_CACHE, Fault.REFUSE)
        assert (await whole_update(receiver)).kv_kept
    async with receiving(mode=PauseMode.RETRACT, control_s=1.0) as (engine, receiver):
        engine.fail_next(Route.FLUSH_CACHE, Fault.HANG)
        with pytest.raises(WeightSyncError) as caught:
            await whole_update(receiver)
        assert caught.value.phase == "flush"


async def test_a_group_that_lives_is_used_again_and_a_fresh_one_replaces_it():
    async with receiving() as (engine, receiver):
        await whole_update(receiver, RENDEZVOUS)
        kept = msgspec.structs.replace(RENDEZVOUS, fresh=False)
        await whole_update(receiver, kept, "g2")
        assert engine.num_calls(Route.INIT_GROUP) == 1
        fresh = msgspec.structs.replace(RENDEZVOUS, group_name="g3")
        await whole_update(receiver, fresh, "g2")
        assert list(engine.groups) == ["g3"]


async def test_abandon_leaves_the_engine_as_it_was():
    async with receiving() as (engine, receiver):
        await receiver.begin()
        await receiver.abandon()
        assert not engine.paused
        assert not engine.session_open
        assert engine.weight_version == "default"


async def test_a_refused_bucket_does_not_stop_the_ones_after_it():
    async with receiving() as (engine, receiver):
        await receiver.begin()
        await receiver.join(RENDEZVOUS, "")
        engine.fail_next(Route.UPDATE_FROM_DISTRIBUTED, Fault.REFUSE)
        with pytest.raises(WeightSyncError, match="bucket 0"):
            await receiver.receive(RENDEZVOUS)
        assert engine.num_calls(Route.UPDATE_FROM_DISTRIBUTED) == 3


async def test_an_engine_that_received_nothing_is_sent_nothing_more():
    """It would take the bytes of this bucket for the next one's."""
    async with receiving() as (engine, receiver):
        await receiver.begin()
        await receiver.join(RENDEZVOUS, "")
        update = engine.update

        async def refuse(request):
            await update(request)
            raise RequestRefused(f"{NOT_RECEIVED}: no memory for a bucket: CUDA out of memory.")

        engine.update = refuse
        with pytest.raises(WeightSyncError, match=r"bucket 0.*CUDA out of memory") as caught:
            await receiver.receive(RENDEZVOUS)
        assert was_refused(caught.value)
        assert engine.num_calls(Route.UPDATE_FROM_DISTRIBUTED) == 1


async def test_an_engine_that_does_not_answer_is_sent_nothing_more():
    async with receiving(timeout_s=0.1) as (engine, receiver):
        await receiver.begin()
        await receiver.join(RENDEZVOUS, "")
        engine.fail_next(Route.UPDATE_FROM_DISTRIBUTED, Fault.HANG)
        with pytest.raises(WeightSyncError, match="bucket 0"):
            await receiver.receive(RENDEZVOUS)
        assert engine.num_calls(Route.UPDATE_FROM_DISTRIBUTED) == 1


@pytest.mark.parametrize(
    ("path", "phase"),
    [
        (Route.PAUSE, "pause"),
        (Route.BEGIN_UPDATE, "begin"),
        (Route.INIT_GROUP, "init_group"),
        (Route.END_UPDATE, "end"),
        (Route.MODEL_INFO, "version"),
        (Route.WEIGHTS_CHECKER, "checksum"),
        (Route.CONTINUE, "resume"),
        (Route.GENERATE, "probe"),
    ],
)
@pytest.mark.parametrize(("fault", "deadline_s"), [(Fault.STATUS_500, 20.0), (Fault.HANG, 0.5)])
async def test_every_phase_fails_by_name_and_within_its_deadline(path, phase, fault, deadline_s):
    async with receiving(timeout_s=deadline_s, control_s=deadline_s) as (engine, receiver):
        engine.fail_next(path, fault)
        async with asyncio.timeout(15.0):
            with pytest.raises(WeightSyncError) as caught:
                await whole_update(receiver)
    assert (caught.value.peer, caught.value.weights, caught.value.phase) == ("e", "1.3", phase)


@pytest.mark.parametrize(
    ("fault", "phase"), [(Fault.WRONG_VERSION, "version"), (Fault.NOT_LOADED, "probe")]
)
async def test_weights_that_did_not_arrive_are_noticed(fault, phase):
    async with receiving() as (engine, receiver):
        engine.fail_next(Route.UPDATE_FROM_DISTRIBUTED, fault, times=3)
        with pytest.raises(WeightSyncError) as caught:
            await whole_update(receiver)
    assert caught.value.phase == phase


async def test_the_tolerance_decides():
    true = fake_prompt_logprobs("1.3", IDS)
    near = probe_of(IDS, [value + 0.01 for value in true], 0.02)
    async with receiving(probe=near) as (_, receiver):
        await whole_update(receiver)
    far = msgspec.structs.replace(near, tolerance=0.005)
    async with receiving(probe=far) as (_, receiver):
        with pytest.raises(WeightSyncError, match="differ"):
            await whole_update(receiver)
    not_a_number = probe_of(IDS, [float("nan")] * 2, 0.02)
    async with receiving(probe=not_a_number) as (_, receiver):
        with pytest.raises(WeightSyncError, match="differ"):
            await whole_update(receiver)


def long_probe(off, *more, tolerance=0.15, largest=5.0):
    """Sets of 40 positions; each with |differences| of its own."""
    sets = []
    for number, differences in enumerate((off, *more)):
        ids = [3 + (number + at) % 50 for at in range(41)]
        true = fake_prompt_logprobs("1.3", ids)
        values = [value + differences(at) for at, value in enumerate(true)]
        sets.append(ProbeIds(token_ids=ids, logprobs=values))
    return Probe(sets=sets, tolerance=tolerance, max_tolerance=largest)


async def test_one_token_that_rounding_moved_far_condemns_nobody():
    """A run keeps its probe, so that one unlucky position would fail every engine for ever."""
    one_off = long_probe(lambda at: 1.8 if at == 20 else 0.05)
    async with receiving(probe=one_off) as (_, receiver):
        await whole_update(receiver)
        gap = await receiver.probe(None)
    assert (gap.mean, gap.largest) == (pytest.approx(0.0986, abs=1e-3), pytest.approx(1.8))
    gross = long_probe(lambda at: 5.1 if at == 20 else 0.0)
    async with receiving(probe=gross) as (_, receiver):
        with pytest.raises(WeightSyncError, match=r"5\.1 at most"):
            await whole_update(receiver)
    everywhere = long_probe(lambda at: 0.2)
    async with receiving(probe=everywhere) as (_, receiver):
        with pytest.raises(WeightSyncError, match=r"0\.2 nats on average"):
            await whole_update(receiver)


async def test_the_first_positions_are_not_compared():
    """An attention sink's states are so large that rounding them moves log-probs far."""
    sinks = long_probe(lambda at: 9.0 if at < 4 else 0.0)
    async with receiving(probe=sinks) as (_, receiver):
        await whole_update(receiver)


async def test_other_ids_are_asked_about_before_an_engine_is_condemned(caplog):
    unlucky = long_probe(lambda at: 0.3, lambda at: 0.1)
    async with receiving(probe=unlucky) as (engine, receiver):
        await whole_update(receiver)
        asked = [call.body for call in engine.calls if call.path is Route.GENERATE]
    assert [each["input_ids"] for each in asked] == [ids.token_ids for ids in unlucky.sets]
    assert len({each["rid"] for each in asked}) == len({each["extra_key"] for each in asked}) == 2
    assert "probe 0 of weights 1.3 is off by 0.3 nats" in caplog.text
    wrong = long_probe(lambda at: 0.3, lambda at: 0.2)
    async with receiving(probe=wrong) as (_, receiver):
        with pytest.raises(WeightSyncError, match="each of 2 sets"):
            await whole_update(receiver)


async def test_a_short_context_is_asked_the_beginning_of_the_probe():
    probe = long_probe(lambda at: 9.0 if at > 9 else 0.0)
    async with receiving(probe=probe) as (engine, receiver):
        await receiver.begin()
        await receiver.join(RENDEZVOUS, "")
        await receiver.receive(RENDEZVOUS)
        await receiver.finish()
        await receiver.resume()
        assert (await receiver.probe(10)).largest < 1e-6
        assert engine.calls[-1].body["input_ids"] == probe.sets[0].token_ids[:10]
