"""The first calls to a server, with whatever its last driver left behind."""

import asyncio

import msgspec
import pytest

from async_grpo.engine_api import (
    SGLANG_RESERVE,
    GenerateRequest,
    InitGroupRequest,
    PauseMode,
    SamplingParams,
)
from async_grpo.engine_api import Path as Route
from async_grpo.errors import GenerationError
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.handshake import shake_hands
from async_grpo.generation.names import Holder
from tests.fakes.fake_engine import FakeEngine

REQUEST = GenerateRequest(
    input_ids=[3, 4],
    sampling_params=SamplingParams(max_new_tokens=4),
    return_logprob=True,
    rid="left",
)


ME = Holder("run", "gen/0")


async def greet(engine, *, left_group="", vocab_size=64, me=ME):
    client = HttpEngineClient(engine.url, control_timeout_s=2.0, vocab_size=vocab_size)
    try:
        greeted = await shake_hands(
            client, me=me, attached=True, left_group=left_group, timeout_s=2.0, answer_s=0.05
        )
        return greeted.info
    finally:
        await client.close()


async def test_sizes_are_learned_from_whatever_tells_them():
    sizes = {"context_length": 512, "max_running_requests": 7}
    async with FakeEngine(**sizes) as ours, FakeEngine(**sizes, like_sglang=True) as real:
        for engine in (ours, real):
            info = await greet(engine)
            reserve = 0 if engine is ours else SGLANG_RESERVE
            assert (info.context_length, info.max_running_requests) == (512 - reserve, 7)
            assert (info.tp_size, info.dp_size, info.pp_size) == (1, 1, 1)


async def test_a_cache_smaller_than_the_context_is_the_limit():
    """SGLang would cut completions short without a word."""
    async with FakeEngine(context_length=512, max_running_requests=4) as engine:
        load = engine.load()
        engine.load = lambda: msgspec.structs.replace(load, max_total_num_tokens=100)
        assert (await greet(engine)).context_length == 100


async def test_b082_what_a_dead_trainer_left_is_cleaned_up():
    async with FakeEngine(manual=True, like_sglang=True) as engine:
        await engine.init_group(
            InitGroupRequest(
                master_address="a", master_port=1, rank_offset=1, world_size=2, group_name="old"
            )
        )
        client = HttpEngineClient(engine.url, control_timeout_s=2.0, vocab_size=64)
        left = asyncio.create_task(client.generate(REQUEST, timeout_s=30.0))
        await engine.until(lambda: len(engine.running) == 1)
        await engine.pause(PauseMode.RETRACT)
        await engine.begin_update()
        await greet(engine, left_group="old")
        assert not engine.session_open
        assert not engine.paused
        assert engine.groups == {}
        assert (await left).meta_info.finish_reason["type"] == "abort"
        assert engine.running == []
        await client.close()


async def test_nothing_of_the_cleanup_waits_for_running_requests():
    """An unpaused server ends a session only when its requests have ended."""
    async with FakeEngine() as engine:
        await greet(engine)
        paths = [call.path for call in engine.calls]
        assert (
            paths.index(Route.PAUSE) < paths.index(Route.END_UPDATE) < paths.index(Route.CONTINUE)
        )
        assert engine.pauses == [PauseMode.IN_PLACE]
        assert Route.HEALTH not in paths, "it hangs while paused and costs a second"


async def test_a_server_before_update_sessions_and_ready_is_taken():
    async with FakeEngine(like_sglang=True) as engine:
        engine.missing = {Route.BEGIN_UPDATE, Route.END_UPDATE, Route.READY, Route.MODELS}
        assert (await greet(engine)).version == "0.5.23"


async def test_a_server_that_is_not_ready_is_asked_again():
    async with FakeEngine() as engine:
        engine.fail_forever("still loading")
        with pytest.raises(GenerationError, match="not ready") as caught:
            await greet(engine)
        assert caught.value.retryable
        assert engine.num_calls(Route.ABORT) == 0


async def test_another_vocabulary_is_refused_before_any_id_is_sent():
    async with FakeEngine(vocab_size=32, like_sglang=True) as engine:
        with pytest.raises(GenerationError, match="32 token ids, but the policy has 64") as caught:
            await greet(engine, vocab_size=64)
        assert not caught.value.retryable
