"""The embedded engine: the backend of the routes over one model and its batching thread.

Three threads: the event loop (HTTP, requests, this class), the model thread (everything that needs
the model still: pauses, updates, prompt log-probs, partial outputs) and the batching thread.

A request is *held* here while decoding is stopped, else handed to the batching thread, which
delivers its result to the event loop. What unblocks a waiting `generate`: its last token, an abort,
or the death of the batching thread; a held one also needs `resume` or `end_update`.
"""

import asyncio
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
import transformers

from async_grpo.config.schema import Config
from async_grpo.engine.admission import Limits, RequestRefused
from async_grpo.engine.batching import Batching, Sampled
from async_grpo.engine.model_thread import ModelThread
from async_grpo.engine.pending import Pending
from async_grpo.engine.replies import ABORTED
from async_grpo.engine.weight_loader import WeightLoader
from async_grpo.engine_api import (
    DestroyGroupRequest,
    GenerateReply,
    GenerateRequest,
    InitGroupRequest,
    ModelInfo,
    ServerInfo,
    UpdateFromDistributedRequest,
)

if TYPE_CHECKING:
    from async_grpo.engine.model import LoadedModel

logger = logging.getLogger(__name__)

INITIAL_VERSION = "default"
"""weight_version of the checkpoint the engine started from; not a weights name."""

UNVERSIONED = "unversioned"
"""weight_version after a session that loaded weights and named none. Not a weights name, so that
no completion is ever tagged with weights it was not sampled under."""

_STOP_TIMEOUT_S = 5.0


class EmbeddedEngine:
    """`engine.routes.EngineBackend` over transformers. Event-loop thread only.

    Args:
        config: sizes and deadlines.
        model: the policy; its weights are replaced in place by updates.
    """

    def __init__(self, config: Config, model: "LoadedModel") -> None:
        self._config = config
        self._model = model
        self._thread = ModelThread()
        self._loader = WeightLoader(model.module, model.device, config.weights.timeout_s)
        self._batching = Batching(
            model,
            config.engine,
            version=INITIAL_VERSION,
            on_finished=self._finished,
            on_death=self._died,
        )
        self._pending: dict[str, Pending] = {}
        self._rids: dict[str, Pending] = {}
        self._held: list[Pending] = []
        self._to_abort: list[Pending] = []
        self._aborting: asyncio.Task[None] | None = None
        self._going_on: set[asyncio.Task[None]] = set()
        self._num_requests = 0
        self._paused = False
        self._session_open = False
        self._unversioned_load = False
        self._pause = ExitStack()
        self._failure = ""
        self.died = asyncio.Event()

    def start(self) -> None:
        """Begin to decode."""
        self._batching.start()

    def stop(self) -> None:
        """End decoding; unfinished requests get no answer."""
        idle = self._thread.close(timeout_s=_STOP_TIMEOUT_S)
        self._batching.stop(timeout_s=_STOP_TIMEOUT_S, paused=self._stopped)
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
        return self._failure

    @property
    def _stopped(self) -> bool:
        return self._paused or self._session_open

    # ---- requests

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """One completion."""
        pending = self._admit(request)
        try:
            if self._stopped:
                self._held.append(pending)
            else:
                await self._submit(pending)
            return await pending.done
        except asyncio.CancelledError:
            self._abort_soon([pending])  # the client has gone
            raise
        except RequestRefused:
            self._pending.pop(pending.key, None)
            raise
        finally:
            self._rids.pop(pending.rid, None)

    async def abort(self, rid: str) -> None:
        """End one request."""
        if pending := self._rids.get(rid):
            await asyncio.shield(self._abort_soon([pending]))

    async def abort_all(self) -> None:
        """End all requests."""
        if self._pending:
            await asyncio.shield(self._abort_soon(list(self._pending.values())))

    def _admit(self, request: GenerateRequest) -> Pending:
        if self._failure:
            raise RequestRefused(self._failure, status=503)
        self._num_requests += 1
        key = f"r{self._num_requests}"
        rid = request.rid or key
        if rid in self._rids:
            raise RequestRefused(f"request id {rid!r} is in use")
        params = request.sampling_params
        eos = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            eos |= frozenset(self._model.eos_token_ids)
        pending = Pending(key, request, eos, asyncio.get_running_loop().create_future())
        self._pending[key] = self._rids[rid] = pending
        return pending

    async def _submit(self, pending: Pending) -> None:
        request = pending.request
        if request.return_logprob and request.logprob_start_len == 0:
            try:
                await self._thread.run(self._score_and_enqueue, pending)
            except RuntimeError as error:  # decoding has ended
                raise RequestRefused(str(error), status=503) from error
        else:
            self._enqueue(pending)

    def _score_and_enqueue(self, pending: Pending) -> None:
        """Model thread: log-probs of the prompt by a plain forward, then queue the request.

        Under one pause, so that both are of the same weights.
        """
        ids = torch.tensor([pending.request.input_ids], device=self._model.device)
        with self._batching.pause(), torch.inference_mode():
            logits = self._model.module(input_ids=ids, use_cache=False).logits[0, :-1].float()
            chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])
            pending.prompt_logprobs = chosen[:, 0].tolist()
            self._enqueue(pending)

    def _enqueue(self, pending: Pending) -> None:
        params = pending.request.sampling_params
        accepted = self._batching.submit(
            pending.key,
            pending.request.input_ids,
            max_new_tokens=params.max_new_tokens,
            eos_token_ids=tuple(pending.eos_token_ids),
            temperature=params.temperature,
        )
        if not accepted:
            raise RequestRefused(self._failure or "the engine is stopping", status=503)

    def _finished(self, key: str, sampled: Sampled) -> None:
        if pending := self._pending.pop(key, None):  # else aborted before
            pending.answer(sampled)

    def _abort_soon(self, requests: list[Pending]) -> "asyncio.Task[None]":
        """Abort; requests that come meanwhile share the next pause."""
        self._to_abort += requests
        if self._aborting is None or self._aborting.done():
            self._aborting = asyncio.create_task(self._abort_queued())
        return self._aborting

    async def _abort_queued(self) -> None:
        while self._to_abort and not self._failure:
            batch, self._to_abort = self._to_abort, []
            for pending in batch:
                if pending in self._held:
                    self._held.remove(pending)
            try:
                partial = await self._thread.run(self._cancel, [pending.key for pending in batch])
            except RuntimeError as error:  # no pause any more: `_died` answers the requests
                logger.warning("%d requests were not aborted: %s", len(batch), error)
                return
            nothing = Sampled([], [], self._batching.version, [])
            for pending in batch:
                self._pending.pop(pending.key, None)
                pending.answer(partial.get(pending.key, nothing), ABORTED)

    def _cancel(self, keys: list[str]) -> dict[str, Sampled]:
        with self._batching.pause():
            return self._batching.cancel(keys)

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
            max_running_requests=self._config.engine.max_running_requests,
            context_length=self.limits.context_length,
            dtype=self._config.policy.dtype.value,
            vocab_size=self.limits.vocab_size,
        )

    async def checksum(self) -> str:
        """Hash over all weights."""
        return await self._thread.run(self._loader.checksum)

    # ---- pauses and updates

    async def flush_cache(self) -> None:
        """There is no prefix cache; refused while requests are unfinished, as by the real one."""
        if self._pending:
            raise RequestRefused(f"{len(self._pending)} requests are unfinished")

    async def pause(self) -> None:
        """Stop decoding between two steps."""
        was_stopped, self._paused = self._stopped, True
        await self._hold(was_stopped)

    async def resume(self) -> None:
        """Go on, unless an update session is open."""
        was_stopped, self._paused = self._stopped, False
        await self._release(was_stopped)

    async def begin_update(self) -> None:
        """Open a session.

        It stops decoding by itself until it ends, so that no token is sampled from half-updated
        weights even if nobody called pause.
        """
        if self._session_open:
            raise RequestRefused("a weight update is open already")
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
            raise RequestRefused("abort_all_requests=true is not supported; call /abort_request")
        await self._thread.run(self._load, request)
        if request.flush_cache and self._pending:
            raise RequestRefused("Weights were updated, but the cache was not flushed")

    def _load(self, request: UpdateFromDistributedRequest) -> None:
        """Model thread. One job: a client that gives up must not leave new weights unnamed."""
        self._loader.load(request)
        self._unversioned_load = request.weight_version is None
        if request.weight_version is not None:
            self._batching.switch_version(request.weight_version)

    async def init_group(self, request: InitGroupRequest) -> None:
        """Join an update group."""
        await self._thread.run(self._loader.init_group, request)

    async def destroy_group(self, request: DestroyGroupRequest) -> None:
        """Leave it."""
        await self._thread.run(self._loader.destroy_group, request)

    async def _hold(self, was_stopped: bool) -> None:
        if not was_stopped:
            try:
                await self._thread.run(lambda: self._pause.enter_context(self._batching.pause()))
            except RuntimeError as error:
                raise RequestRefused(str(error), status=503) from error

    async def _release(self, was_stopped: bool) -> None:
        if was_stopped and not self._stopped:
            going_on = asyncio.create_task(self._go_on())
            self._going_on.add(going_on)
            going_on.add_done_callback(self._going_on.discard)
            await asyncio.shield(going_on)  # held requests go on though the caller gave up

    async def _go_on(self) -> None:
        await self._thread.run(self._pause.close)
        held, self._held = self._held, []
        for pending in held:
            await self._submit_held(pending)

    async def _submit_held(self, pending: Pending) -> None:
        if self._stopped:  # again, while the one before was submitted
            self._held.append(pending)
        elif not pending.done.done():
            try:
                await self._submit(pending)
            except RequestRefused as refused:
                pending.fail(refused)

    def _died(self, reason: str) -> None:
        logger.error("%s", reason)
        self._failure = reason
        for pending in self._pending.values():
            pending.fail(RequestRefused(reason, status=503))
        self._pending.clear()
        self.died.set()
