"""The embedded engine with a fault that can be planted: `faulty_engine.py CONFIG`.

    POST /plant {"fault": "unscaled"}       # or "none"

Prints {"url": ...} once it listens; ends with SIGTERM. What it returns wrongly is computed by a
shadow copy of the model, as a real engine with that fault would compute it.
"""

import asyncio
import copy
import itertools
import json
import random
import signal
import sys
from enum import StrEnum
from typing import Any

import torch
from aiohttp import web

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.load import load_config
from async_grpo.engine.embedded import EmbeddedEngine
from async_grpo.engine.model import LoadedModel, load_model
from async_grpo.engine.routes import make_app
from async_grpo.engine_api import (
    GenerateReply,
    GenerateRequest,
    UpdateFromDistributedRequest,
    WeightVersionSpan,
)

IGNORED_TENSOR = "model.layers.1.mlp.up_proj.weight"
BLOCK_TOKENS = 16
"""Prompts that are shorter are not cached."""


class Fault(StrEnum):
    NONE = "none"
    UNSCALED = "unscaled"
    """log-probs are of the distribution at temperature 1, whatever was sampled at"""
    STALE_PREFIX = "stale_prefix"
    """a cached prompt's KV is never dropped, and namespaces are ignored"""
    IGNORED_TENSOR = "ignored_tensor"
    """`IGNORED_TENSOR` stays as it was, and every update is acknowledged"""
    ONE_VERSION = "one_version"
    """a completion is tagged whole with the version that sampled its last token"""
    LATE_TOKEN = "late_token"
    """after an in-place update, the last token of the weights before is counted to the next span"""
    SHARPENED = "sharpened"
    """sampled at a lower temperature than asked for"""
    NOISY = "noisy"
    """log-probs of a prompt differ from call to call"""
    OTHER_TEXT = "other_text"
    """its tokenizer is another model's"""
    SILENT = "silent"
    """answers nothing any more once it has received a bucket"""
    REFUSES_UPDATES = "refuses_updates"
    """takes no bucket"""


class FaultyEngine:
    """Backend of the routes; all that is not faulty is the embedded engine's."""

    def __init__(self, engine: EmbeddedEngine, model: LoadedModel) -> None:
        self._engine, self._module = engine, model.module
        self._shadow = copy.deepcopy(model.module)
        self._cache: dict[tuple[int, ...], Any] = {}
        self._random = random.Random(0)
        self._fault = Fault.NONE
        self._silent = False
        self._speaks = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def plant(self, http: web.Request) -> web.Response:
        self._fault = Fault((await http.json())["fault"])
        self._cache.clear()
        self._silent = False
        self._speaks.set()
        return web.json_response({})

    @web.middleware
    async def listen(self, http: web.Request, handler: Any) -> web.StreamResponse:
        if self._silent and http.path != "/plant":
            await self._speaks.wait()
        return await handler(http)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        asked = request.sampling_params.temperature
        if self._fault is Fault.SHARPENED and not request.sampling_params.ignore_eos:
            request.sampling_params.temperature = asked / 3
        reply = await self._engine.generate(request)
        meta, prompt, ids = reply.meta_info, request.input_ids, reply.output_ids
        if self._fault is Fault.UNSCALED and asked != 1:
            self._replace(reply, self._logprobs(prompt, ids, 1.0))
        # those that are to cross an update are left alone: the shadow has the weights after it
        if self._fault is Fault.SHARPENED and not request.sampling_params.ignore_eos:
            self._replace(reply, self._logprobs(prompt, ids, asked))
        if self._fault is Fault.STALE_PREFIX and len(prompt) >= BLOCK_TOKENS:
            meta.cached_tokens = len(prompt) - 1 if tuple(prompt) in self._cache else 0
            self._replace(reply, self._logprobs_over_cache(prompt, ids, asked))
        if self._fault is Fault.ONE_VERSION and meta.weight_versions:
            meta.weight_versions = [
                WeightVersionSpan(version=meta.weight_version, start=0, end=len(ids))
            ]
        if self._fault is Fault.LATE_TOKEN and not meta.num_retractions:
            for before, after in itertools.pairwise(meta.weight_versions):
                before.end -= 1
                after.start -= 1
        if self._fault is Fault.NOISY:
            meta.input_token_logprobs = [
                (value if value is None else value + self._random.gauss(0, 0.05), token, text)
                for value, token, text in meta.input_token_logprobs
            ]
        if self._fault is Fault.OTHER_TEXT:
            reply.text = "another vocabulary"
        return reply

    async def update(self, request: UpdateFromDistributedRequest) -> None:
        kept = self._module.get_parameter(IGNORED_TENSOR).clone()
        if self._fault is Fault.REFUSES_UPDATES:
            request.names = [f"{name}.unknown" for name in request.names]
        await self._engine.update(request)
        if self._fault is Fault.IGNORED_TENSOR:
            self._module.get_parameter(IGNORED_TENSOR).copy_(kept)
        if self._fault is Fault.SILENT:
            self._silent = True
            self._speaks.clear()

    def _replace(self, reply: GenerateReply, logprobs: list[float]) -> None:
        pairs = zip(logprobs, reply.output_ids, strict=True)
        reply.meta_info.output_token_logprobs = [(value, token, None) for value, token in pairs]

    @torch.no_grad()
    def _logprobs(self, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
        self._shadow.load_state_dict(self._module.state_dict())
        logits = self._shadow(torch.tensor([prompt + ids]), use_cache=False).logits
        return _chosen(logits[0, len(prompt) - 1 : -1], ids, temperature)

    @torch.no_grad()
    def _logprobs_over_cache(
        self, prompt: list[int], ids: list[int], temperature: float
    ) -> list[float]:
        """With the KV of the first time that this prompt was seen, whatever the weights are now."""
        self._shadow.load_state_dict(self._module.state_dict())
        if tuple(prompt) not in self._cache:
            output = self._shadow(torch.tensor([prompt[:-1]]), use_cache=True)
            self._cache[tuple(prompt)] = output.past_key_values
        past = copy.deepcopy(self._cache[tuple(prompt)])
        step = torch.tensor([prompt[-1:] + ids[:-1]])
        logits = self._shadow(step, past_key_values=past, use_cache=True).logits
        return _chosen(logits[0], ids, temperature)


def _chosen(logits: torch.Tensor, ids: list[int], temperature: float) -> list[float]:
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


async def serve(config_path: str) -> None:
    config = load_config(config_path)
    model = load_model(config)
    engine = EmbeddedEngine(config, model)
    faulty = FaultyEngine(engine, model)
    engine.start()
    app = make_app(faulty, EngineKeys())
    app.middlewares.append(faulty.listen)
    app.router.add_post("/plant", faulty.plant)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    await stop.wait()
    await runner.cleanup()
    engine.stop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(sys.argv[1]))
