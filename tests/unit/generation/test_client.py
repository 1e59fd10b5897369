import asyncio
import logging
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.engine_api import GenerateRequest, PauseMode, SamplingParams
from async_grpo.engine_api import Path as Route
from async_grpo.errors import GenerationError
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.update_modes import kv_tokens
from tests.fakes.fake_engine import FakeEngine, Fault, Script, fake_prompt_logprobs

REQUEST = GenerateRequest(
    input_ids=[3, 4], sampling_params=SamplingParams(max_new_tokens=4), return_logprob=True
)


@asynccontextmanager
async def connected(**options):
    async with FakeEngine(**options) as engine:
        client = HttpEngineClient(engine.url, control_timeout_s=2.0, vocab_size=64)
        try:
            yield engine, client
        finally:
            await client.close()


async def test_generate_and_infos():
    async with connected() as (engine, client):
        engine.script = lambda request: Script([5, 6], [-0.5, -0.25])
        answer = await client.generate(REQUEST, timeout_s=2.0)
        assert answer.output_ids == [5, 6]
        assert [pair[0] for pair in answer.meta_info.output_token_logprobs] == [-0.5, -0.25]
        assert (await client.model_info()).weight_version == "default"
        assert (await client.server_info(timeout_s=1.0)).max_running_requests == 64
        assert (await client.checksums()).total == await engine.checksum()


async def test_pause_resume_and_sessions():
    async with connected() as (engine, client):
        await client.pause(PauseMode.IN_PLACE)
        assert engine.paused
        await client.begin_update()
        with pytest.raises(GenerationError, match="is open") as caught:
            await client.begin_update()
        assert not caught.value.retryable
        await client.end_update()
        await client.end_update(missing_ok=True)
        with pytest.raises(GenerationError, match="no weight update"):
            await client.end_update()
        await client.destroy_group("never built")
        await client.abort("unknown")
        await client.resume()
        assert not engine.paused


@pytest.mark.parametrize(("fault", "retryable"), [(Fault.STATUS_500, True), (Fault.REFUSE, False)])
async def test_statuses_say_whether_to_try_again(fault, retryable):
    async with connected() as (engine, client):
        engine.fail_next(Route.GENERATE, fault)
        with pytest.raises(GenerationError, match="/generate: HTTP") as caught:
            await client.generate(REQUEST, timeout_s=2.0)
        assert caught.value.retryable is retryable


async def test_every_call_has_a_deadline():
    async with connected() as (engine, client):
        engine.fail_next(Route.GENERATE, Fault.HANG)
        with pytest.raises(GenerationError, match=r"did not answer within 0\.05 s") as caught:
            await client.generate(REQUEST, timeout_s=0.05)
        assert caught.value.retryable


async def test_a_server_that_is_gone_is_a_retryable_error():
    async with connected() as (engine, client):
        await client.model_info()
        await engine.stop()
        with pytest.raises(GenerationError) as caught:
            await client.model_info()
        assert caught.value.retryable


async def test_close_ends_calls_under_way():
    async with connected(manual=True) as (engine, client):
        call = asyncio.create_task(client.generate(REQUEST, timeout_s=30.0))
        await engine.until(lambda: len(engine.running) == 1)
        await client.close()
        with pytest.raises(GenerationError) as caught:
            await call
        assert caught.value.retryable
        with pytest.raises(GenerationError, match="closed"):
            await client.model_info()
        await engine.until(lambda: not engine.running)


async def test_the_last_id_of_the_vocabulary_has_its_name_among_a_prompts_log_probs():
    """SGLang calls it 0: every probe that holds it would be refused."""
    async with connected(vocab_size=64) as (engine, client):
        ids = [0, 63, 5, 63, 0]
        scoring = msgspec.structs.replace(REQUEST, input_ids=ids, logprob_start_len=0)
        pairs = (await client.generate(scoring, timeout_s=2.0)).meta_info.input_token_logprobs
        assert [token_id for _, token_id, _ in pairs] == ids
        assert [logprob for logprob, *_ in pairs[1:]] == fake_prompt_logprobs("default", ids)
        # what is another id by mistake stays one
        engine._named = lambda token_id: 7
        pairs = (await client.generate(scoring, timeout_s=2.0)).meta_info.input_token_logprobs
        assert [token_id for _, token_id, _ in pairs] == [7] * 5


@pytest.mark.parametrize("token_ids", [[3, 64], [-1, 3], []], ids=str)
async def test_ids_outside_the_vocabulary_are_never_sent(token_ids):
    async with connected(vocab_size=64) as (engine, client):
        request = msgspec.structs.replace(REQUEST, input_ids=token_ids)
        with pytest.raises(GenerationError, match="vocabulary") as caught:
            await client.generate(request, timeout_s=2.0)
        assert not caught.value.retryable
        assert engine.num_calls(Route.GENERATE) == 0


async def test_the_vocabulary_is_the_one_the_server_tells_or_the_policys():
    async with FakeEngine(vocab_size=8) as engine:
        client = HttpEngineClient(engine.url, control_timeout_s=2.0)
        with pytest.raises(GenerationError, match="not known"):
            await client.generate(REQUEST, timeout_s=2.0)
        await client.server_info(timeout_s=2.0)
        await client.generate(REQUEST, timeout_s=2.0)
        with pytest.raises(GenerationError, match="vocabulary"):
            await client.generate(msgspec.structs.replace(REQUEST, input_ids=[8]), timeout_s=2.0)
        await client.close()


async def test_a_silent_server_has_one_question_open_at_a_time():
    async with connected() as (engine, client):
        engine.fail_next(Route.SERVER_INFO, Fault.HANG)
        for _ in range(3):
            with pytest.raises(GenerationError, match="/server_info did not answer") as caught:
                await client.server_info(timeout_s=0.02)
            assert caught.value.retryable
        assert engine.num_calls(Route.SERVER_INFO) == 1
        engine.release_hanging()
        assert (await client.server_info(timeout_s=5.0)).version == "fake"
        assert engine.num_calls(Route.SERVER_INFO) == 1
        assert (await client.server_info(timeout_s=5.0)).version == "fake"
        assert engine.num_calls(Route.SERVER_INFO) == 2


async def test_a_question_that_is_open_when_the_client_is_closed_fails():
    async with connected() as (engine, client):
        engine.fail_next(Route.SERVER_INFO, Fault.HANG)
        question = asyncio.create_task(client.server_info(timeout_s=30.0))
        await engine.called(Route.SERVER_INFO)
        await client.close()
        with pytest.raises(GenerationError, match="closed") as caught:
            await question
        assert caught.value.retryable


async def test_ready_is_what_the_server_says():
    async with connected() as (engine, client):
        assert await client.ready()
        await client.pause(PauseMode.RETRACT)
        assert not await client.ready()
        engine.missing.add(Route.READY)
        assert await client.ready(), "an older server has no such call"
        engine.missing.clear()
        engine.fail_next(Route.READY, Fault.STATUS_500)
        with pytest.raises(GenerationError):
            await client.ready()


async def test_a_server_without_update_sessions_is_updated_without():
    """Row 21: they became mandatory in 0.5.23, and do not exist before."""
    async with connected() as (engine, client):
        engine.missing = {Route.BEGIN_UPDATE, Route.END_UPDATE}
        with pytest.raises(GenerationError, match="404"):
            await client.end_update()
        await client.end_update(missing_ok=True)
        calls = len(engine.calls)
        await client.begin_update()
        await client.end_update()
        assert len(engine.calls) == calls


@pytest.mark.parametrize("status", [404, 405])
async def test_a_server_without_a_weights_checker_gives_no_checksum_and_this_is_said_once(
    caplog, status
):
    async with connected() as (engine, client):
        engine.missing, engine.missing_status = {Route.WEIGHTS_CHECKER}, status
        with caplog.at_level(logging.WARNING):
            assert await client.checksums() is None
            assert await client.checksums() is None
        assert engine.num_calls(Route.WEIGHTS_CHECKER) == 1, "it is not asked again"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has no /weights_checker" in line


async def test_a_refused_key_is_no_missing_session():
    async with FakeEngine(keys=EngineKeys("a")) as engine:
        client = HttpEngineClient(engine.url, control_timeout_s=2.0)
        with pytest.raises(GenerationError, match="401"):
            await client.end_update(missing_ok=True)
        with pytest.raises(GenerationError, match="401"):
            await client.destroy_group("any")
        await client.close()


@pytest.mark.parametrize("like_sglang", [False, True])
async def test_another_vocabulary_than_the_policys_is_refused(like_sglang):
    async with FakeEngine(vocab_size=8, like_sglang=like_sglang) as engine:
        for policys, message in (
            (8, ""),
            (None, ""),
            (64, "of 8 token ids, but the policy has 64"),
        ):
            client = HttpEngineClient(engine.url, control_timeout_s=2.0, vocab_size=policys)
            info = await client.server_info(timeout_s=2.0)
            if message:
                with pytest.raises(GenerationError, match=message) as caught:
                    await client.adopt(info)
                assert not caught.value.retryable
            else:
                await client.adopt(info)
                request = msgspec.structs.replace(REQUEST, input_ids=[8])
                with pytest.raises(GenerationError, match=r"must be in \[0, 8\)"):
                    await client.generate(request, timeout_s=2.0)
            await client.close()
        assert not any(8 in call.body.get("input_ids", ()) for call in engine.calls)


async def test_there_are_as_many_connections_as_slots_and_more_for_control():
    async with connected(manual=True, max_running_requests=2) as (engine, client):
        await client.adopt(await client.server_info(timeout_s=2.0))
        requests = [msgspec.structs.replace(REQUEST, rid=str(number)) for number in range(3)]
        calls = [asyncio.create_task(client.generate(r, timeout_s=30.0)) for r in requests]
        await engine.until(lambda: len(engine.running) == 2)
        await client.abort("none")  # needs no slot
        assert len(engine.running) == 2
        await engine.step(4)
        await engine.until(lambda: engine.num_calls(Route.GENERATE) == 3)
        await engine.step(4)
        await asyncio.gather(*calls)
        assert engine.max_in_flight == 2


async def test_the_load_and_the_flush():
    async with connected(manual=True) as (engine, client):
        await client.flush_cache()
        call = asyncio.create_task(client.generate(REQUEST, timeout_s=30.0))
        await engine.until(lambda: len(engine.running) == 1)
        load = await client.load()
        assert load.num_running_reqs == 1
        assert kv_tokens(load) == 2
        with pytest.raises(GenerationError, match="unfinished") as caught:
            await client.flush_cache()
        assert not caught.value.retryable
        await engine.step(4)
        await call


@pytest.mark.parametrize(
    ("sent", "opens"),
    [(EngineKeys("a", "b"), True), (EngineKeys("a"), False), (EngineKeys("b", "a"), False)],
)
async def test_both_keys_are_sent_where_they_belong(sent, opens):
    async with FakeEngine(keys=EngineKeys("a", "b")) as engine:
        client = HttpEngineClient(engine.url, control_timeout_s=2.0, keys=sent)
        try:
            if opens:
                await client.model_info()
                await client.pause(PauseMode.RETRACT)
                await client.resume()
            else:
                with pytest.raises(GenerationError, match=r"HTTP 401.*Unauthorized"):
                    await client.pause(PauseMode.RETRACT)
        finally:
            await client.close()


@pytest.mark.parametrize("body", ["", "[]", "{", '{"text": 1}'])
async def test_an_unreadable_reply_is_refused(body):
    async def answer(request):
        return web.Response(text=body)

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = HttpEngineClient(url, control_timeout_s=1.0, vocab_size=64)
    try:
        with pytest.raises(GenerationError, match="unreadable") as caught:
            await client.generate(REQUEST, timeout_s=2.0)
        assert not caught.value.retryable
    finally:
        await client.close()
        await runner.cleanup()
