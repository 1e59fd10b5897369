"""A real SGLang as an engine of ours: started, greeted, killed, and started again."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import pytest

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.schema import Config
from async_grpo.engine_api import SGLANG_RESERVE, GenerateRequest, PauseMode, SamplingParams
from async_grpo.errors import GenerationError
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.handles import OwnedEngine
from async_grpo.generation.handshake import shake_hands
from async_grpo.generation.lifecycle import EngineSlot
from async_grpo.generation.names import Holder
from async_grpo.generation.starts import engine_starts
from async_grpo.replay_parts import EngineState
from tests.contracts.engine.conftest import CONTEXT_LENGTH, VOCAB_SIZE, make_model, make_tokenizer
from tests.sglang.real_server import require_environment
from tools.sglang_cpu.serve import serving_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

KEYS = EngineKeys("of-requests", "of-control")
SLOTS = 8
START_S = 360.0
ME = Holder("run", "gen/0")


def _config(directory: Path) -> Config:
    model = directory / "model"
    make_model(0).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    changes = {
        "run.output_dir": directory,
        "engine.max_running_requests": SLOTS,
        "engine.start_timeout_s": START_S,
    }
    return serving_config(model, [f"{name}={value}" for name, value in changes.items()])


class Running:
    """A slot with the handles of its processes."""

    def __init__(self, config: Config) -> None:
        (self._start,) = engine_starts(config, "gen", [], KEYS)
        self.handles: list[OwnedEngine] = []
        self._changed = asyncio.Event()
        self.slot = EngineSlot(
            "gen/0",
            self._begin,
            partial(HttpEngineClient, control_timeout_s=20.0, vocab_size=VOCAB_SIZE, keys=KEYS),
            config.engine,
            liveness_s=1.0,
            on_change=self._changed.set,
            run="run",
        )
        self.task = asyncio.create_task(self.slot.run())

    async def _begin(self, engine_id: str) -> OwnedEngine:
        handle = await self._start(engine_id)
        assert isinstance(handle, OwnedEngine)
        self.handles.append(handle)
        self._changed.set()
        return handle

    async def until(self, condition) -> None:
        async with asyncio.timeout(START_S):
            while not condition():
                await self._changed.wait()
                self._changed.clear()

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def _nobody_answers(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{url}/ready")


async def test_a_killed_server_is_started_again_and_never_serves_its_checkpoint(tmp_path):
    require_environment()
    running = Running(_config(tmp_path))
    slot = running.slot
    try:
        await running.until(lambda: slot.engine is not None)
        engine = slot.engine
        assert engine.info.version.startswith("0.5.")
        assert (engine.num_slots, engine.info.context_length) == (
            SLOTS - 1, CONTEXT_LENGTH - SGLANG_RESERVE,
        )  # fmt: skip
        assert engine.status.state is EngineState.SYNCING
        assert engine.status.wants_sync
        assert not engine.serving, "it holds a checkpoint, not the trainer's weights"
        await _check_requests(engine.client)
        await _check_greeting(running.handles[0].url)

        os.kill(running.handles[0].pid, signal.SIGKILL)
        await running.until(lambda: len(running.handles) == 2)
        assert slot.engine is None
        assert slot.status.state is EngineState.STARTING
        assert slot.status.engine_id != engine.engine_id
        assert "code -9" in slot.last_error
        await _nobody_answers(running.handles[0].url)
    finally:
        await running.end()
    await _nobody_answers(running.handles[1].url)


async def _check_requests(client) -> None:
    """Ids that it knows are sampled from; others would end it and are not sent."""
    request = GenerateRequest(
        input_ids=[3, 4, VOCAB_SIZE - 1],
        sampling_params=SamplingParams(max_new_tokens=4, ignore_eos=True),
        return_logprob=True,
    )
    reply = await client.generate(request, timeout_s=60.0)
    assert reply.meta_info.prompt_tokens == 3
    assert len(reply.output_ids) == len(reply.meta_info.output_token_logprobs) == 4
    with pytest.raises(GenerationError, match=r"must be in \[0, "):
        await client.generate(
            msgspec.structs.replace(request, input_ids=[VOCAB_SIZE]), timeout_s=60.0
        )


async def _check_greeting(url: str) -> None:
    """What a dead driver leaves is cleaned up; another policy is refused."""
    options = {"control_timeout_s": 20.0, "keys": KEYS}
    dead = HttpEngineClient(url, **options)
    await dead.pause(PauseMode.RETRACT)
    await dead.begin_update()
    await dead.close()
    client = HttpEngineClient(url, vocab_size=VOCAB_SIZE, **options)
    await shake_hands(client, me=ME, attached=True, left_group="never-joined", timeout_s=20.0)
    assert await client.ready()
    await client.begin_update()  # the session before is closed, or this would be refused
    await client.end_update()
    await client.close()
    other = HttpEngineClient(url, vocab_size=VOCAB_SIZE + 1, **options)
    with pytest.raises(GenerationError, match=f"of {VOCAB_SIZE} token ids, but the policy has"):
        await shake_hands(other, me=ME, attached=True, left_group="", timeout_s=20.0)
    await other.close()
