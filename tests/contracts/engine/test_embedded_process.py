"""What only the embedded engine promises: its process, and what happens when decoding dies."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from async_grpo.config.load import load_config
from async_grpo.engine import server
from async_grpo.engine.admission import RequestRefused
from async_grpo.engine.embedded import EmbeddedEngine
from async_grpo.engine.model import LoadedModel, load_model
from async_grpo.engine_api import GenerateRequest, PauseMode, SamplingParams
from async_grpo.errors import ConfigError, GenerationError
from tests.contracts.engine.conftest import serve
from tests.fakes.tiny_moe import save_tiny_moe

pytestmark = pytest.mark.timeout(180)  # a process that imports torch on a busy machine


def request_of(num_tokens: int, **fields: Any) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(
        input_ids=[3, 4, 5], sampling_params=params, return_logprob=True, **fields
    )


def failing_model(config_path: Path) -> LoadedModel:
    """A model whose forward pass fails from its third call on."""
    model = load_model(load_config(config_path))
    calls = iter(range(2))

    def check(*_: Any) -> None:
        if next(calls, None) is None:
            raise RuntimeError("this model fails")

    model.module.register_forward_pre_hook(check)
    return model


def notice_forward(model: LoadedModel) -> asyncio.Event:
    """Set when the model computes."""
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def notice(*_: Any) -> None:
        loop.call_soon_threadsafe(reached.set)

    model.module.register_forward_pre_hook(notice)
    return reached


async def test_a_dead_batching_loop_is_reported(config_path: Path) -> None:
    engine = EmbeddedEngine(load_config(config_path), failing_model(config_path))
    engine.start()
    try:
        with pytest.raises(RequestRefused, match="this model fails") as refused:
            await engine.generate(request_of(50))
        assert refused.value.status >= 500
        async with asyncio.timeout(10):
            await engine.died.wait()
        assert "this model fails" in engine.failure
        for attempt in (engine.generate(request_of(1)), engine.pause(PauseMode.IN_PLACE)):
            with pytest.raises(RequestRefused) as refused:
                await attempt
            assert refused.value.status == 503
    finally:
        engine.stop()


async def test_the_server_ends_with_an_error_when_decoding_dies(config_path: Path) -> None:
    announced = asyncio.get_running_loop().create_future()
    config, model = load_config(config_path), failing_model(config_path)
    serving = asyncio.create_task(
        server.serve(config, model, port=0, announce=announced.set_result)
    )
    body = {"input_ids": [3], "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
    async with aiohttp.ClientSession(await announced) as http:
        async with http.post("/generate", json=body) as reply:
            assert reply.status >= 500
            assert "this model fails" in (await reply.json())["error"]["message"]
        with pytest.raises(GenerationError, match="this model fails"):
            await asyncio.wait_for(serving, 10)


async def test_seeded_engines_sample_the_same_and_others_differ(config_path: Path) -> None:
    async def first_sample(*overrides: str) -> list[int]:
        config = load_config(config_path, overrides)
        engine = EmbeddedEngine(config, load_model(config))
        engine.start()
        try:
            return (await engine.generate(request_of(40))).output_ids
        finally:
            engine.stop()

    seeded = [await first_sample("engine.sampling_seed=7") for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert await first_sample() != await first_sample()


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_a_prompt_half_read_at_an_update_is_read_again(
    config_path: Path, mode: PauseMode
) -> None:
    """Its first token must not come from KV entries of two sets of weights."""
    config = load_config(config_path, ["engine.max_batch_tokens=64"])
    model = load_model(config)
    engine = EmbeddedEngine(config, model)
    reached = notice_forward(model)
    engine.start()
    try:
        prompt = [2 + i % 40 for i in range(2000)]
        request = GenerateRequest(
            input_ids=prompt,
            sampling_params=SamplingParams(max_new_tokens=3, ignore_eos=True),
            return_logprob=True,
        )
        running = asyncio.create_task(engine.generate(request))
        await reached.wait()
        await engine.pause(mode)
        assert not running.done()
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(0.5)
        await engine._thread.run(engine._batching.switch_version, "1.1")
        await engine.resume()
        reply = await running
        ids = torch.tensor([prompt + reply.output_ids])
        logits = model.module(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        found = torch.tensor([pair[0] for pair in reply.meta_info.output_token_logprobs])
        assert (found - expected).abs().max() < 1e-4
        spans = reply.meta_info.weight_versions
        assert [(span.version, span.start, span.end) for span in spans] == [("1.1", 0, 3)]
    finally:
        engine.stop()


async def test_requests_outlast_a_cache_that_is_too_small(config_path: Path) -> None:
    """Running requests are reset and read again; no token or log-prob is lost."""
    config = load_config(
        config_path,
        [
            "generation.max_new_tokens=200",
            "engine.context_length=256",
            "engine.kv_cache_bytes=500_000",
        ],
    )
    engine = EmbeddedEngine(config, load_model(config))
    engine.start()
    try:
        replies = await asyncio.gather(*(engine.generate(request_of(200)) for _ in range(8)))
        for reply in replies:
            assert len(reply.output_ids) == 200 == len(reply.meta_info.output_token_logprobs)
    finally:
        engine.stop()


@pytest.mark.parametrize("ended", ["retract", "abort"])
async def test_a_full_cache_lets_others_in_again(config_path: Path, ended: str) -> None:
    """A full cache blocks waiting requests until one ends: a retraction or an abort ends some."""
    config = load_config(config_path, ["engine.max_running_requests=2"])
    model = load_model(config)
    engine = EmbeddedEngine(config, model)
    reached = notice_forward(model)
    engine.start()
    try:
        requests = [request_of(2000, rid=f"{i}") for i in range(2)] + [request_of(5)]
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        await reached.wait()
        await engine.pause(PauseMode.IN_PLACE)
        assert not any(task.done() for task in running)
        engine._batching._manager.batch_processor.scheduler.block_new_requests = True
        if ended == "retract":
            await engine.pause(PauseMode.RETRACT)
        else:
            await asyncio.gather(engine.abort("0"), engine.abort("1"))
        await engine.resume()
        async with asyncio.timeout(60):
            assert len((await running[2]).output_ids) == 5
        await engine.abort_all()
        await asyncio.gather(*running)
    finally:
        engine.stop()


def test_sizes_that_cannot_work_are_refused(config_path: Path) -> None:
    with pytest.raises(ConfigError, match="context_length"):
        load_model(load_config(config_path, ["engine.context_length=5000"]))
    with pytest.raises(ConfigError, match=r"policy\.model"):
        load_model(load_config(config_path, ["policy.model=/no/such/directory"]))


def test_sigterm_ends_even_a_paused_process_cleanly(config_path: Path) -> None:
    process, url = serve(config_path)
    asyncio.run(post(url + "/pause_generation", {"mode": "in_place"}))
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert process.stdout is not None
    assert process.stdout.read() == ""
    process.stdout.close()


async def post(url: str, body: Any) -> None:
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as reply:
        assert reply.status == 200


@pytest.mark.parametrize(
    ("kind", "why"),
    [("deepseek_v3", r"sizes \[16, 8\]"), ("qwen3_next", "linear attention")],
)
def test_a_model_that_the_cache_cannot_hold_is_refused_when_it_is_loaded(
    kind: str, why: str, config_path: Path, tmp_path: Path
) -> None:
    model = save_tiny_moe(kind, tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"cannot serve \w+: .*{why}.*engine\.kind=sglang"):
        load_model(load_config(config_path, [f"policy.model={model}"]))


def test_experts_and_buffers_fit_the_cache(config_path: Path, tmp_path: Path) -> None:
    model = save_tiny_moe("glm4_moe", tmp_path / "model")
    assert load_model(load_config(config_path, [f"policy.model={model}"])).limits.vocab_size == 50
