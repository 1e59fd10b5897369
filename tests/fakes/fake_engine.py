"""A scripted engine that speaks SGLang's HTTP API, without torch.

    engine = FakeEngine(vocab_size=32)
    async with engine:                        # listens on engine.url
        engine.script = lambda request: Script([5, 6, EOS], [-0.1, -0.2, -0.3])
        ...
        await engine.called(Path.BEGIN_UPDATE)    # wait until a call has arrived

By default a request gets seeded random tokens and is answered at once. With `manual=True` requests
stay in flight and get tokens only by `engine.step(n)`. Bucket updates are accepted without a
collective: the content of the weights is just the name that the last bucket brings, and
`fake_logprob` depends on it, so that a probe notices weights that never arrived.
"""

import asyncio
import hashlib
import math
import pathlib
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import msgspec
from aiohttp import web

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.engine.admission import Limits, RequestRefused
from async_grpo.engine.routes import make_app
from async_grpo.engine_api import (
    FLATTENED_BUCKET,
    Checksums,
    DestroyGroupRequest,
    GenerateReply,
    GenerateRequest,
    InitGroupRequest,
    Load,
    MetaInfo,
    ModelInfo,
    Path,
    PauseMode,
    ServerInfo,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
    UpdateVersionRequest,
    WeightVersionSpan,
)
from async_grpo.replay_parts import Probe, ProbeIds

EOS = 1
PROBE_IDS = [3, 4, 5, 6]


def fake_logprob(weights: str, position: int, token_id: int) -> float:
    """Log-prob that the fake reports; differs between weights, positions and tokens."""
    digest = hashlib.sha256(f"{weights}/{position}/{token_id}".encode()).digest()
    return -0.1 - int.from_bytes(digest[:4], "big") / 2**32


def fake_prompt_logprobs(weights: str, token_ids: list[int]) -> list[float]:
    """[len - 1] log-probs of ids 1.. : what a trainer's probe of these weights would hold."""
    return [fake_logprob(weights, i, token_ids[i]) for i in range(1, len(token_ids))]


def weights_of(version: str) -> str:
    """`run:slot:1.107?...` names the same weights as `1.107`."""
    return version.partition("?")[0].rpartition(":")[2]


def fake_probe(weights: str) -> Probe:
    """The trainer's probe of these weights."""
    return probe_of(PROBE_IDS, fake_prompt_logprobs(weights, PROBE_IDS), 1e-6)


def probe_of(token_ids: list[int], logprobs: list[float], tolerance: float) -> Probe:
    """A probe of one set, of which no position may be off by more than `tolerance`."""
    ids = ProbeIds(token_ids=token_ids, logprobs=logprobs)
    return Probe(sets=[ids], tolerance=tolerance, max_tolerance=tolerance)


class Fault(StrEnum):
    """What goes wrong with one call."""

    STATUS_500 = "status_500"
    HANG = "hang"
    """The call is not answered until `FakeEngine.release_hanging` (or the client gives up)."""
    REFUSE = "refuse"
    """400 with success false."""
    SHORT_LOGPROBS = "short_logprobs"
    """/generate: one log-prob less than ids."""
    NAN_LOGPROB = "nan_logprob"
    """/generate: the last log-prob is not a number (null in JSON, as the real server does)."""
    WRONG_VERSION = "wrong_version"
    """update: weights are loaded, but the version does not move."""
    NOT_LOADED = "not_loaded"
    """update: acknowledged and the version moves, but the weights stay."""


@dataclass
class Script:
    """What one request samples; its end is a stop. Without log-probs, `fake_logprob` gives them."""

    token_ids: list[int]
    logprobs: list[float] | None = None


@dataclass
class Call:
    """One HTTP call as it arrived."""

    path: Path
    body: dict[str, Any]


@dataclass
class _Running:
    request: GenerateRequest
    script: Script
    done: asyncio.Future[dict[str, Any]]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    num_retractions: int = 0


def _json_object(body: bytes) -> dict[str, Any]:
    """The body, or nothing if it is none: then the route itself refuses it."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


class FakeEngine:
    """One fake engine; also the backend of its own routes (`engine.routes.EngineBackend`).

    Attributes:
        url: base URL while started.
        calls: every call in order of arrival.
        script: what each request samples.
        weight_version: the label that replies carry.
        loaded: the weights that log-probs come from; follows weight_version unless a fault.
        max_in_flight: largest number of requests seen at once.
        pauses: the mode of each pause so far.
        num_flushes: successful flushes so far.
        missing: routes that this "version" does not have; they answer `missing_status`.

    Args:
        like_sglang: sizes are told as SGLang tells them: its context by /v1/models, its slots by
            /v1/loads, its vocabulary by the refusal of a request.
        deterministic: /server_info says that it is.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        context_length: int = 512,
        max_running_requests: int = 64,
        seed: int = 0,
        manual: bool = False,
        weight_version: str = "default",
        keys: EngineKeys | None = None,
        like_sglang: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.url = ""
        self.missing: set[Path] = set()
        self.deaf = False
        self.missing_status = 404
        self._like_sglang = like_sglang
        self._deterministic = deterministic
        self._keys = keys or EngineKeys()
        self.pauses: list[PauseMode] = []
        self.num_flushes = 0
        self._kv_is_free = False
        self._num_finished = self._num_aborted = 0
        self.calls: list[Call] = []
        self.script: Callable[[GenerateRequest], Script] = self.random_script
        self.manual = manual
        self.weight_version = self.loaded = weight_version
        self.groups: dict[str, InitGroupRequest] = {}
        self.session_open = False
        self.updates: list[UpdateFromDistributedRequest] = []
        self.max_in_flight = 0
        self._limits = Limits(vocab_size=vocab_size, context_length=context_length)
        self._max_running_requests = max_running_requests
        self._random = random.Random(seed)
        self._running: dict[str, _Running] = {}
        self._paused = False
        self._failure = ""
        self._faults: dict[Path, deque[Fault | None]] = {}
        self._current: dict[asyncio.Task[Any], Fault] = {}
        self._hanging = asyncio.Event()
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._num_anonymous = 0

    # ---- life

    async def start(self, *, port: int = 0) -> str:
        """Listen on loopback; the base URL."""
        app = make_app(self, self._keys)
        app.middlewares.append(self._observe)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self.url

    async def stop(self) -> None:
        """Close every connection, as a killed process does."""
        self._hanging.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    # ---- control by the test

    def fail_next(self, path: Path, fault: Fault, times: int = 1, *, skip: int = 0) -> None:
        """The next `times` calls of `path` go wrong, but for the first `skip`."""
        self._faults.setdefault(path, deque()).extend([*[None] * skip, *[fault] * times])

    def fail_forever(self, reason: str) -> None:
        """/ready and /health answer 503 from now on."""
        self._failure = reason

    def release_hanging(self) -> None:
        """Calls that hang go on."""
        self._hanging.set()
        self._hanging = asyncio.Event()

    @property
    def running(self) -> list[str]:
        """Request ids in flight, oldest first."""
        return list(self._running)

    def num_calls(self, path: Path) -> int:
        """Calls of `path` so far."""
        return Counter(call.path for call in self.calls)[path]

    async def called(self, path: Path, times: int = 1) -> Call:
        """Wait until `path` was called `times` times; the last of these calls."""
        await self.until(lambda: self.num_calls(path) >= times)
        return [call for call in self.calls if call.path == path][times - 1]

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
        """Wait for something that calls or steps bring about."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    async def step(self, num_tokens: int = 1) -> None:
        """Every request in flight samples `num_tokens` more; nothing while paused."""
        if not self._stopped:
            for running in list(self._running.values()):
                self._advance(running, num_tokens)
        await self._notify()

    def random_script(self, request: GenerateRequest) -> Script:
        """Random ids that end with EOS or at max_new_tokens."""
        budget = request.sampling_params.max_new_tokens
        length = self._random.randint(1, budget)
        ids = [self._random.randrange(2, self._limits.vocab_size) for _ in range(length)]
        if length < budget and not request.sampling_params.ignore_eos:
            ids[-1] = EOS
        elif length < budget:
            ids += [2] * (budget - length)
        return Script(ids)

    # ---- the backend

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def failure(self) -> str:
        return self._failure

    @property
    def _stopped(self) -> bool:
        return self._paused or self.session_open

    async def generate(self, request: GenerateRequest) -> dict[str, Any]:
        rid = request.rid
        if rid is None:
            self._num_anonymous += 1
            rid = f"anonymous-{self._num_anonymous}"
        if rid in self._running:
            raise RequestRefused(f"request id {rid!r} is in use")
        fault = self._current_fault()
        done = asyncio.get_running_loop().create_future()
        running = _Running(msgspec.structs.replace(request, rid=rid), self.script(request), done)
        self._running[rid] = running
        self.max_in_flight = max(self.max_in_flight, len(self._running))
        await self._notify()
        if not self.manual and not self._stopped:
            self._advance(running, request.sampling_params.max_new_tokens)
        try:
            reply = await done
        finally:
            self._running.pop(rid, None)
            await self._notify()
        pairs = reply["meta_info"]["output_token_logprobs"]
        if fault is Fault.SHORT_LOGPROBS:
            pairs.pop()
        if fault is Fault.NAN_LOGPROB:
            pairs[-1][0] = math.nan
        return reply

    async def abort(self, rid: str) -> None:
        if (running := self._running.get(rid)) and not self.deaf:
            self._finish(running, {"type": "abort", "message": "Aborted"})

    async def abort_all(self) -> None:
        for rid in list(self._running):
            await self.abort(rid)

    def model_info(self) -> ModelInfo:
        return ModelInfo(model_path="fake", weight_version=self.weight_version, model_type="fake")

    def server_info(self) -> ServerInfo:
        if self._like_sglang:
            return ServerInfo(version="0.5.23")
        return ServerInfo(
            version="fake",
            engine="embedded",
            max_running_requests=self._max_running_requests,
            context_length=self._limits.context_length,
            vocab_size=self._limits.vocab_size,
            dtype="float32",
            enable_deterministic_inference=self._deterministic,
        )

    def load(self) -> Load:
        kv = [len(r.request.input_ids) + len(r.token_ids) for r in self._running.values()]
        size = self._max_running_requests * self._limits.context_length
        waiting = len(kv) if self._kv_is_free else 0
        return Load(
            num_running_reqs=len(kv) - waiting,
            num_waiting_reqs=waiting,
            token_usage=0.0 if self._kv_is_free else sum(kv) / size,
            max_total_num_tokens=size,
            max_running_requests=self._max_running_requests,
        )

    def metrics(self) -> str:
        load = self.load()
        values = {
            "num_running_reqs": load.num_running_reqs,
            "num_queue_reqs": load.num_waiting_reqs,
            "token_usage": load.token_usage,
            "num_requests_total": self._num_finished,
            "num_aborted_requests_total": self._num_aborted,
        }
        return "".join(f'sglang:{name}{{model_name="fake"}} {v}\n' for name, v in values.items())

    @property
    def _flushable(self) -> bool:
        return self._kv_is_free or not self._running

    async def flush_cache(self) -> None:
        if not self._flushable:
            raise RequestRefused(f"{len(self._running)} requests are unfinished")
        self.num_flushes += 1

    async def pause(self, mode: PauseMode) -> None:
        self._paused = True
        self.pauses.append(mode)
        if mode is PauseMode.ABORT:
            await self.abort_all()
        if mode is PauseMode.RETRACT:
            self._retract()
        if mode is not PauseMode.IN_PLACE:
            self._kv_is_free = True

    def _retract(self) -> None:
        if not self._kv_is_free:
            for running in self._running.values():
                running.num_retractions += bool(running.token_ids)

    async def resume(self) -> None:
        self._paused = False
        self._go_on()

    async def init_group(self, request: InitGroupRequest) -> None:
        if request.group_name in self.groups:
            raise RequestRefused(f"group {request.group_name!r} exists")
        self.groups[request.group_name] = request

    async def destroy_group(self, request: DestroyGroupRequest) -> None:
        if self.groups.pop(request.group_name, None) is None:
            raise RequestRefused(f"no group {request.group_name!r}")

    async def begin_update(self) -> None:
        if self.session_open:
            raise RequestRefused("a weight update is open")
        self.session_open = True

    async def update_from_disk(self, request: UpdateFromDiskRequest) -> int:
        if self.session_open:
            raise RequestRefused("a weight update is open")
        if not (pathlib.Path(request.model_path) / "model.safetensors").is_file():
            raise RequestRefused(f"{request.model_path} holds no safetensors files")
        if request.abort_all_requests:
            await self.abort_all()
        if not self._paused:
            self._retract()
        self.weight_version = request.weight_version or "unversioned"
        self.loaded = weights_of(self.weight_version)
        if request.flush_cache and self._paused and not self._flushable:
            raise RequestRefused("Weights were updated, but the cache was not flushed")
        return len(self._running) if self._paused else 0

    async def update_version(self, request: UpdateVersionRequest) -> None:
        if request.abort_all_requests:
            await self.abort_all()
        self.weight_version = request.new_version

    async def update(self, request: UpdateFromDistributedRequest) -> None:
        fault = self._current_fault()
        if not self.session_open:
            raise RequestRefused("must run between begin_weight_update and end_weight_update")
        if request.load_format not in (None, FLATTENED_BUCKET):
            raise RequestRefused(f"load_format {request.load_format!r} is not supported")
        if request.group_name not in self.groups:
            raise RequestRefused(f"no group {request.group_name!r}")
        if not len(request.names) == len(request.dtypes) == len(request.shapes):
            raise RequestRefused("names, dtypes and shapes differ in length")
        if request.abort_all_requests:
            await self.abort_all()
        self.updates.append(request)
        if request.weight_version is not None:
            if fault is not Fault.WRONG_VERSION:
                self.weight_version = request.weight_version
            if fault is not Fault.NOT_LOADED:
                self.loaded = weights_of(request.weight_version)
        if request.flush_cache and not self._flushable:
            raise RequestRefused("Weights were updated, but the cache was not flushed")

    async def end_update(self) -> None:
        if not self.session_open:
            raise RequestRefused("no weight update is open")
        self.session_open = False
        self._go_on()

    async def checksums(self) -> Checksums:
        return Checksums(total=await self.checksum(), tensors={})

    async def checksum(self) -> str:
        return hashlib.sha256(self.loaded.encode()).hexdigest()

    # ---- inside

    def _go_on(self) -> None:
        if not self._stopped:
            self._kv_is_free = False
        if not self._stopped and not self.manual:
            for running in list(self._running.values()):
                self._advance(running, running.request.sampling_params.max_new_tokens)

    def _advance(self, running: _Running, num_tokens: int) -> None:
        params = running.request.sampling_params
        eos = set() if params.ignore_eos else {EOS, *(params.stop_token_ids or ())}
        for _ in range(num_tokens):
            at = len(running.token_ids)
            token = running.script.token_ids[at]
            position = len(running.request.input_ids) + at
            scripted = running.script.logprobs
            running.token_ids.append(token)
            running.logprobs.append(
                scripted[at] if scripted else fake_logprob(self.loaded, position, token)
            )
            running.versions.append(self.weight_version)
            if token in eos:
                return self._finish(running, {"type": "stop", "matched": token})
            if at + 1 >= params.max_new_tokens:
                return self._finish(running, {"type": "length", "length": at + 1})
            if at + 1 == len(running.script.token_ids):
                return self._finish(running, {"type": "stop", "matched": token})
        return None

    def _finish(self, running: _Running, finish_reason: dict[str, Any]) -> None:
        if not running.done.done():
            self._num_finished += 1
            self._num_aborted += finish_reason["type"] == "abort"
            running.done.set_result(msgspec.to_builtins(self._reply(running, finish_reason)))

    def _reply(self, running: _Running, finish_reason: dict[str, Any]) -> GenerateReply:
        request = running.request
        ids = request.input_ids
        prompt_logprobs: list[tuple[float | None, int, str | None]] = []
        if request.return_logprob and request.logprob_start_len == 0:
            known = [None, *fake_prompt_logprobs(self.loaded, ids)]
            prompt_logprobs = [(known[i], self._named(id_), None) for i, id_ in enumerate(ids)]
        spans: list[WeightVersionSpan] = []
        for position, version in enumerate(running.versions):
            if spans and spans[-1].version == version:
                spans[-1].end = position + 1
            else:
                spans.append(WeightVersionSpan(version=version, start=position, end=position + 1))
        pairs = zip(running.logprobs, running.token_ids, strict=True)
        meta = MetaInfo(
            id=request.rid or "",
            finish_reason=finish_reason,
            prompt_tokens=len(ids),
            completion_tokens=len(running.token_ids),
            output_token_logprobs=[(logprob, token, None) for logprob, token in pairs]
            if request.return_logprob
            else [],
            input_token_logprobs=prompt_logprobs,
            weight_version=spans[-1].version if spans else self.weight_version,
            weight_versions=spans,
            num_retractions=running.num_retractions,
        )
        return GenerateReply(output_ids=running.token_ids, meta_info=meta)

    def _named(self, token_id: int) -> int:
        """SGLang calls the last id 0 here; so that nobody forgets it, this one does too."""
        return 0 if token_id == self._limits.vocab_size - 1 else token_id

    def _current_fault(self) -> Fault | None:
        return self._current.get(asyncio.current_task())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def _with_fault(self, fault: Fault | None) -> AsyncIterator[None]:
        task = asyncio.current_task()
        if fault is not None:
            self._current[task] = fault
        try:
            yield
        finally:
            self._current.pop(task, None)

    @web.middleware
    async def _observe(self, http: web.Request, handler: Any) -> web.StreamResponse:
        path = Path(http.path)
        body = await http.read()
        self.calls.append(Call(path, _json_object(body)))
        await self._notify()
        pending = self._faults.get(path)
        fault = pending.popleft() if pending else None
        if path in self.missing:
            return web.json_response({"detail": "Not Found"}, status=self.missing_status)
        if self._like_sglang and (answer := self._sizes(self.calls[-1])) is not None:
            return answer
        if fault is Fault.HANG:
            await self._hanging.wait()
        if fault is Fault.STATUS_500:
            return web.Response(status=500, text="scripted failure")
        if fault is Fault.REFUSE:
            return web.json_response({"success": False, "message": "scripted"}, status=400)
        async with self._with_fault(fault):
            return await handler(http)

    def _sizes(self, call: Call) -> web.Response | None:
        """What only SGLang answers."""
        if call.path is Path.MODELS:
            return web.json_response({"data": [{"max_model_len": self._limits.context_length}]})
        if call.path is Path.GENERATE and "logit_bias" in call.body["sampling_params"]:
            last = self._limits.vocab_size - 1
            message = f"logit_bias must has keys in [0, {last}], got -1."
            return web.json_response({"error": {"message": message}}, status=400)
        return None
