"""Unfinished requests of the embedded engine: held while decoding is stopped, else being decoded.

What unblocks a waiting `generate`: its last token, an abort, or the death of the batching thread; a
held one also needs `submit_held`.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

import torch

from async_grpo.config.engine import EngineSection
from async_grpo.engine.admission import RequestRefused
from async_grpo.engine.batching import Batching, Sampled
from async_grpo.engine.model_thread import ModelThread
from async_grpo.engine.pending import Pending
from async_grpo.engine.replies import ABORTED, ABORTED_WAITING
from async_grpo.engine.telemetry import Telemetry
from async_grpo.engine_api import GenerateReply, GenerateRequest

if TYPE_CHECKING:
    from async_grpo.engine.model import LoadedModel

logger = logging.getLogger(__name__)


class RequestTable:
    """Requests, and the batching thread that decodes them. Event-loop thread only.

    Args:
        model: the policy.
        section: sizes.
        thread: runs what needs the model still.
        telemetry: counts requests.
        version: of the model's weights.

    Attributes:
        batching: the batching thread.
        stopped: decoding is stopped, so requests are held.
        failure: why no request will ever be decoded again.
        died: set with `failure`.
    """

    def __init__(
        self,
        model: "LoadedModel",
        section: EngineSection,
        thread: ModelThread,
        telemetry: Telemetry,
        *,
        version: str,
    ) -> None:
        self._model = model
        self._thread = thread
        self._telemetry = telemetry
        self.batching = Batching(
            model,
            section,
            version=version,
            on_finished=self._finished,
            on_death=self._died,
        )
        self._pending: dict[str, Pending] = {}
        self._rids: dict[str, Pending] = {}
        self._held: list[Pending] = []
        self._to_abort: list[Pending] = []
        self._aborting: asyncio.Task[None] | None = None
        self._num_admitted = 0
        self.stopped = False
        self.failure = ""
        self.died = asyncio.Event()

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self._pending)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """One completion; cancelling the call aborts it."""
        pending = self._admit(request)
        try:
            if self.stopped:
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
        """End one request; it returns what it has sampled."""
        if pending := self._rids.get(rid):
            await asyncio.shield(self._abort_soon([pending]))

    async def abort_all(self) -> None:
        """End all requests that have come until now."""
        if self._pending:
            await asyncio.shield(self._abort_soon(list(self._pending.values())))

    async def submit_held(self) -> None:
        """Decoding goes on: hand over what was held meanwhile."""
        held, self._held = self._held, []
        for pending in held:
            if self.stopped:  # again, while the one before was submitted
                self._held.append(pending)
            elif not pending.done.done():
                try:
                    await self._submit(pending)
                except RequestRefused as refused:
                    pending.fail(refused)

    def _admit(self, request: GenerateRequest) -> Pending:
        if self.failure:
            raise RequestRefused(self.failure, status=503)
        self._num_admitted += 1
        key = f"r{self._num_admitted}"
        rid = request.rid or key
        if rid in self._rids:
            raise RequestRefused(f"request id {rid!r} is in use")
        params = request.sampling_params
        eos: frozenset[int] = frozenset()
        if not params.ignore_eos:  # SGLang then ignores stop_token_ids too
            eos = frozenset(self._model.eos_token_ids).union(params.stop_token_ids or ())
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
        with self.batching.pause(), torch.inference_mode():
            logits = self._model.module(input_ids=ids, use_cache=False).logits[0, :-1].float()
            chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])
            pending.prompt_logprobs = chosen[:, 0].tolist()
            self._enqueue(pending)

    def _enqueue(self, pending: Pending) -> None:
        params = pending.request.sampling_params
        accepted = self.batching.submit(
            pending.key,
            pending.request.input_ids,
            max_new_tokens=params.max_new_tokens,
            eos_token_ids=tuple(pending.eos_token_ids),
            temperature=params.temperature,
        )
        if not accepted:
            raise RequestRefused(self.failure or "the engine is stopping", status=503)

    def _finished(self, key: str, sampled: Sampled) -> None:
        if pending := self._pending.pop(key, None):  # else aborted before
            self._count(pending, sampled, aborted=False)
            pending.answer(sampled)

    def _count(self, pending: Pending, sampled: Sampled, *, aborted: bool) -> None:
        self._telemetry.finished(
            len(pending.request.input_ids), len(sampled.token_ids), aborted=aborted
        )

    def _abort_soon(self, requests: list[Pending]) -> "asyncio.Task[None]":
        """Abort; requests that come meanwhile share the next pause."""
        self._to_abort += requests
        if self._aborting is None or self._aborting.done():
            self._aborting = asyncio.create_task(self._abort_queued())
        return self._aborting

    async def _abort_queued(self) -> None:
        while self._to_abort and not self.failure:
            batch, self._to_abort = self._to_abort, []
            for pending in batch:
                if pending in self._held:
                    self._held.remove(pending)
            try:
                partial = await self._thread.run(self._cancel, [pending.key for pending in batch])
            except RuntimeError as error:  # no pause any more: `_died` answers the requests
                logger.warning("%d requests were not aborted: %s", len(batch), error)
                return
            nothing = Sampled([], [], self.batching.version, [])
            for pending in batch:
                sampled = partial.get(pending.key, nothing)
                if self._pending.pop(pending.key, None) is not None:
                    self._count(pending, sampled, aborted=True)
                pending.answer(sampled, ABORTED if sampled.token_ids else ABORTED_WAITING)

    def _cancel(self, keys: list[str]) -> dict[str, Sampled]:
        with self.batching.pause():
            return self.batching.cancel(keys)

    def _died(self, reason: str) -> None:
        logger.error("%s", reason)
        self.failure = reason
        for pending in self._pending.values():
            pending.fail(RequestRefused(reason, status=503))
        self._pending.clear()
        self.died.set()
