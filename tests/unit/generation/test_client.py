import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from async_grpo.engine_api import GenerateRequest, PauseMode, SamplingParams
from async_grpo.engine_api import Path as Route
from async_grpo.errors import GenerationError
from async_grpo.generation.client import HttpEngineClient
from tests.fakes.fake_engine import FakeEngine, Fault, Script

REQUEST = GenerateRequest(
    input_ids=[3, 4], sampling_params=SamplingParams(max_new_tokens=4), return_logprob=True
)


@asynccontextmanager
async def connected(**options):
    async with FakeEngine(**options) as engine:
        client = HttpEngineClient(engine.url, control_timeout_s=2.0)
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
        assert await client.checksum() == await engine.checksum()


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
    client = HttpEngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}", control_timeout_s=1.0)
    try:
        with pytest.raises(GenerationError, match="unreadable") as caught:
            await client.generate(REQUEST, timeout_s=2.0)
        assert not caught.value.retryable
    finally:
        await client.close()
        await runner.cleanup()
