"""The embedded engine: the backend of the routes over one model and its batching thread.

Three threads: the event loop (HTTP, requests, this class), the model thread (everything that needs
the model still: pauses, updates, prompt log-probs, partial outputs) and the batching thread.

Decoding is stopped by /pause_generation, by an update session, or while weights are read from a
disk; it goes on when none of them holds. Requests that come meanwhile are held (`RequestTable`).
"""

import asyncio
import secrets
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import transformers

from async_grpo.config.schema import Config
from async_grpo.engine.admission import Limits, RequestRefused
from async_grpo.engine.checkpoint_files import CheckpointFiles
from async_grpo.engine.model_thread import ModelThread
from async_grpo.engine.request_table import RequestTable
from async_grpo.engine.telemetry import Telemetry
from async_grpo.engine.weight_loader import WeightLoader
from async_grpo.engine_api import (
    Checksums,
    DestroyGroupRequest,
    GenerateReply,
    GenerateRequest,
    InitGroupRequest,
    Load,
    ModelInfo,
    PauseMode,
    ServerInfo,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
    UpdateVersionRequest,
)

if TYPE_CHECKING:
    from async_grpo.engine.model import LoadedModel

INITIAL_VERSION = "default"
"""weight_version of the checkpoint the engine started from; not a weights name."""

UNVERSIONED = "unversioned"
"""weight_version after weights were loaded that nobody named. Not a weights name, so that no
completion is ever tagged with weights it was not sampled under."""

_STOP_TIMEOUT_S = 5.0
_NOT_FLUSHED = "Weights were updated, but the cache was not flushed"


class EmbeddedEngine:
    """`engine.backend.EngineBackend` over transformers. Event-loop thread only.

    Args:
        config: sizes and deadlines.
        model: the policy; its weights are replaced in place by updates.
    """

    def __init__(self, config: Config, model: "LoadedModel") -> None:
        self._config = config
        self._instance = secrets.token_hex(8)
        self._model = model
        self._thread = ModelThread()
        self._loader = WeightLoader(model.module, model.device, config.weights.timeout_s)
        self._telemetry = Telemetry()
        self._requests = RequestTable(
            model, config.engine, self._thread, self._telemetry, version=INITIAL_VERSION
        )
        self._batching = self._requests.batching
        self._going_on: set[asyncio.Task[None]] = set()
        self._paused = False
        self._session_open = False
        self._reading_disk = False
        self._unversioned_load = False
        self._kv_is_free = False
        self._pause = ExitStack()

    def start(self) -> None:
        """Begin to decode."""
        self._batching.start()

    def stop(self) -> None:
        """End decoding; unfinished requests get no answer."""
        idle = self._thread.close(timeout_s=_STOP_TIMEOUT_S)
        self._batching.stop(timeout_s=_STOP_TIMEOUT_S, paused=self._requests.stopped)
        if idle:
            self._loader.close()

    @property
    def limits(self) -> Limits:
        """What one request may ask for."""
        return self._model.limits

    @property
    def paused(self) -> bool:
        """Decoding is stopped by /pause_generation."""
        return self._paused

    @property
    def failure(self) -> str:
        """Why this engine will never decode again."""
        return self._requests.failure

    @property
    def died(self) -> asyncio.Event:
        """Set with `failure`."""
        return self._requests.died

    # ---- requests

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """One completion."""
        return await self._requests.generate(request)

    async def abort(self, rid: str) -> None:
        """End one request."""
        await self._requests.abort(rid)

    async def abort_all(self) -> None:
        """End all requests."""
        await self._requests.abort_all()

    # ---- questions

    def model_info(self) -> ModelInfo:
        """Model and weight_version."""
        config = self._model.module.config
        return ModelInfo(
            model_path=self._model.path,
            weight_version=self._batching.version,
            model_type=config.model_type,
            architectures=config.architectures,
        )

    def server_info(self) -> ServerInfo:
        """Sizes; the version is transformers'."""
        return ServerInfo(
            version=transformers.__version__,
            engine="embedded",
            instance=self._instance,
            max_running_requests=self._config.engine.max_running_requests,
            context_length=self.limits.context_length,
            dtype=self._config.policy.dtype.value,
            vocab_size=self.limits.vocab_size,
        )

    def load(self) -> Load:
        """How busy it is."""
        held = self._batching.occupancy()
        return Load(
            num_running_reqs=held.num_running,
            num_waiting_reqs=max(0, len(self._requests) - held.num_running),
            token_usage=held.num_kv_tokens / self._batching.num_cache_tokens,
            max_total_num_tokens=self._batching.num_cache_tokens,
            max_running_requests=self._config.engine.max_running_requests,
            gen_throughput=self._telemetry.throughput(held.num_sampled_tokens),
        )

    def metrics(self) -> str:
        """Prometheus text."""
        return self._telemetry.prometheus(
            self._model.path, self.load(), num_paused=len(self._requests) if self._paused else 0
        )

    async def checksums(self) -> Checksums:
        """Of all weights and of each tensor."""
        return await self._thread.run(self._loader.checksums)

    # ---- pauses

    async def flush_cache(self) -> None:
        """There is no prefix cache; refused while requests hold KV, as by the real one."""
        if not self._flushable:
            raise RequestRefused(f"{len(self._requests)} requests are unfinished")

    @property
    def _flushable(self) -> bool:
        return self._kv_is_free or not len(self._requests)

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding between two steps; requests that come from now on are held."""
        was_stopped, self._paused = self._stopped, True
        await self._hold(was_stopped)
        if mode is PauseMode.ABORT:
            await self._requests.abort_all()
        elif mode is PauseMode.RETRACT:
            self._telemetry.num_retracted += await self._thread.run(self._batching.retract)
        else:
            return
        self._kv_is_free = True

    async def resume(self) -> None:
        """Go on, unless an update is under way."""
        was_stopped, self._paused = self._stopped, False
        await self._release(was_stopped)

    @property
    def _stopped(self) -> bool:
        return self._paused or self._session_open or self._reading_disk

    async def _hold(self, was_stopped: bool) -> None:
        self._requests.stopped = True
        if not was_stopped:
            try:
                await self._thread.run(lambda: self._pause.enter_context(self._batching.pause()))
            except RuntimeError as error:
                raise RequestRefused(str(error), status=503) from error

    async def _release(self, was_stopped: bool) -> None:
        if was_stopped and not self._stopped:
            self._requests.stopped = False
            going_on = asyncio.create_task(self._go_on())
            self._going_on.add(going_on)
            going_on.add_done_callback(self._going_on.discard)
            await asyncio.shield(going_on)  # held requests go on though the caller gave up

    async def _go_on(self) -> None:
        self._kv_is_free = False
        await self._thread.run(self._pause.close)
        await self._requests.submit_held()

    # ---- updates

    async def begin_update(self) -> None:
        """Open a session.

        It stops decoding by itself until it ends, so that no token is sampled from half-updated
        weights even if nobody called pause.
        """
        self._check_no_update()
        was_stopped, self._session_open = self._stopped, True
        await self._hold(was_stopped)

    async def end_update(self) -> None:
        """Close the session."""
        if not self._session_open:
            raise RequestRefused("no weight update is open")
        if self._unversioned_load:
            await self._thread.run(self._batching.switch_version, UNVERSIONED)
            self._unversioned_load = False
        was_stopped, self._session_open = self._stopped, False
        await self._release(was_stopped)

    async def update(self, request: UpdateFromDistributedRequest) -> None:
        """Receive and load one bucket."""
        if not self._session_open:
            raise RequestRefused(
                "update_weights_from_distributed must run between begin_weight_update and "
                "end_weight_update"
            )
        if request.abort_all_requests:
            await self._requests.abort_all()
        start_s = time.monotonic()
        await self._thread.run(self._load, request)
        self._telemetry.loaded("distributed", time.monotonic() - start_s)
        if request.flush_cache and not self._flushable:
            raise RequestRefused(_NOT_FLUSHED)

    def _load(self, request: UpdateFromDistributedRequest) -> None:
        """Model thread. One job: a client that gives up must not leave new weights unnamed."""
        self._loader.load(request)
        self._unversioned_load = request.weight_version is None
        if request.weight_version is not None:
            self._batching.switch_version(request.weight_version)

    async def update_from_disk(self, request: UpdateFromDiskRequest) -> int:
        """Load a directory of safetensors; the number of requests that were paused.

        Requests that run unpaused are retracted (SGLang waits for their end instead), so that
        nothing is sampled from mixed weights or KV.
        """
        self._check_no_update()
        if request.load_format not in (None, "auto", "safetensors"):
            raise RequestRefused(f"load_format {request.load_format!r} is not supported")
        if request.abort_all_requests:
            await self._requests.abort_all()
        was_stopped, self._reading_disk = self._stopped, True
        start_s = time.monotonic()
        try:
            await self._hold(was_stopped)
            await self._thread.run(self._load_from_disk, request, retract=not self._paused)
            flushed = self._flushable
        finally:
            was_stopped, self._reading_disk = self._stopped, False
            await self._release(was_stopped)
        self._telemetry.loaded("disk", time.monotonic() - start_s)
        if request.flush_cache and not flushed:
            raise RequestRefused(_NOT_FLUSHED)
        return len(self._requests) if self._paused else 0

    def _load_from_disk(self, request: UpdateFromDiskRequest, *, retract: bool) -> None:
        """Model thread. Refuses what does not fit before anything is touched."""
        files: CheckpointFiles = self._loader.open_directory(request.model_path)
        if retract:
            self._telemetry.num_retracted += self._batching.retract()
            self._kv_is_free = True
        version = UNVERSIONED
        try:
            self._loader.load_directory(files)
            version = request.weight_version or UNVERSIONED
        finally:
            self._batching.switch_version(version)

    async def update_version(self, request: UpdateVersionRequest) -> None:
        """Name the present weights anew; tokens from here on carry the new name."""
        if request.abort_all_requests:
            await self._requests.abort_all()
        try:
            await self._thread.run(self._rename, request.new_version)
        except RuntimeError as error:  # decoding has ended
            raise RequestRefused(str(error), status=503) from error

    def _rename(self, version: str) -> None:
        with self._batching.pause():
            self._batching.switch_version(version)
        self._unversioned_load = False

    def _check_no_update(self) -> None:
        if self._session_open or self._reading_disk:
            raise RequestRefused("a weight update is open already")

    async def init_group(self, request: InitGroupRequest) -> None:
        """Join an update group."""
        await self._thread.run(self._loader.init_group, request)

    async def destroy_group(self, request: DestroyGroupRequest) -> None:
        """Leave it."""
        await self._thread.run(self._loader.destroy_group, request)
