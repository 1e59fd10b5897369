"""Client of one inference server: SGLang's HTTP API, spoken by SGLang and the embedded engine.

Turns every failure into a GenerationError that says whether another try may help. Sends no token
id outside the vocabulary: one such id ends a real server. Knows nothing of groups, weights or
routing.
"""

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.engine_api import (
    AbortRequest,
    Checksums,
    DestroyGroupRequest,
    GenerateReply,
    GenerateRequest,
    InitGroupRequest,
    Load,
    LoadsReply,
    MetaInfo,
    ModelInfo,
    ModelsReply,
    Path,
    PauseMode,
    PauseRequest,
    ServerInfo,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
    UpdateVersionRequest,
    WeightsCheckerReply,
    WeightsCheckerRequest,
)
from async_grpo.errors import GenerationError
from async_grpo.generation.connections import NO_ROUTE, Connections, StatusError

logger = logging.getLogger(__name__)

LATEST_ANSWER_S = 300.0
"""A question to /server_info that is older is asked afresh: its connection may be half open."""
_LAST_ID = re.compile(r"logit_bias must has keys in \[0, (\d+)\]")


class _Answer(msgspec.Struct):
    """`engine_api.ControlReply`, but calls that cannot fail (pause, continue) omit `success`."""

    success: bool = True
    message: str = ""


class HttpEngineClient:
    """`interfaces.EngineClient` over HTTP. Use it on one event loop.

    Args:
        url: `http://host:port` of the server.
        control_timeout_s: deadline of calls that take none.
        vocab_size: of the policy, where it is known.
        keys: to send.
    """

    def __init__(
        self,
        url: str,
        *,
        control_timeout_s: float,
        vocab_size: int | None = None,
        keys: EngineKeys | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._http = Connections(self.url, keys or EngineKeys())
        self._control_timeout_s = control_timeout_s
        self._policy_vocab_size = self._vocab_size = vocab_size
        self._has_update_sessions = self._has_checker = True
        self._asked: asyncio.Task[bytes] | None = None

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> GenerateReply:
        """One completion.

        Raises:
            GenerationError: the server refused, failed or did not answer in time; or an id is
                outside the vocabulary, and was not sent.
        """
        self._check_ids(request.input_ids)
        body = await self._http.call("POST", Path.GENERATE, request, timeout_s)
        reply = self._http.decoded(GenerateReply, body, Path.GENERATE)
        assert self._vocab_size is not None, "checked with the ids"
        _name_last_id(reply.meta_info, request.input_ids, self._vocab_size - 1)
        return reply

    async def abort(self, rid: str) -> None:
        """End a request early; it then returns its partial output. Unknown ids are no error."""
        await self._repeat("POST", Path.ABORT, AbortRequest(rid=rid))

    async def abort_all(self) -> None:
        """End every request early."""
        await self._repeat("POST", Path.ABORT, AbortRequest(abort_all=True))

    async def model_info(self) -> ModelInfo:
        """Model and weight_version."""
        body = await self._repeat("GET", Path.MODEL_INFO, None)
        return self._http.decoded(ModelInfo, body, Path.MODEL_INFO)

    async def ready(self) -> bool:
        """Whether it takes new requests: not while it starts or is paused."""
        try:
            await self._repeat("GET", Path.READY, None)
        except StatusError as error:
            if error.status != 503 and error.status not in NO_ROUTE:
                raise
            return error.status != 503
        return True

    async def server_info(self, *, timeout_s: float) -> ServerInfo:
        """Liveness and sizes.

        A server that is stuck keeps questions and answers them later, all of them. So a call past
        its deadline leaves its question open, and the next call waits for the same answer.
        """
        if self._asked is None:
            self._asked = asyncio.create_task(
                self._http.call("GET", Path.SERVER_INFO, None, LATEST_ANSWER_S)
            )
            self._asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        asked = self._asked
        if not (await asyncio.wait([asked], timeout=timeout_s))[0]:
            raise self._http.silent(Path.SERVER_INFO, timeout_s)
        if self._asked is asked:
            self._asked = None
        if asked.cancelled():
            raise GenerationError(f"{self.url}: the client is closed", retryable=True)
        info = self._http.decoded(ServerInfo, asked.result(), Path.SERVER_INFO)
        if info.vocab_size is not None:
            self._vocab_size = info.vocab_size
        return info

    async def fresh_server_info(self) -> ServerInfo:
        """/server_info over a connection of its own: behind a balancer each may reach another."""
        body = await self._http.call(
            "GET", Path.SERVER_INFO, None, self._control_timeout_s, fresh=True
        )
        return self._http.decoded(ServerInfo, body, Path.SERVER_INFO)

    async def healthy(self) -> bool:
        """Whether it answers /health, as routers do too."""
        try:
            await self._http.call("GET", Path.HEALTH, None, self._control_timeout_s)
        except GenerationError:
            return False
        return True

    async def rename_weights(self, name: str) -> bool:
        """Call the present weights `name`, whatever runs; False: it has no such call."""
        request = UpdateVersionRequest(new_version=name, abort_all_requests=False)
        try:
            await self._repeat("POST", Path.UPDATE_VERSION, request)
        except StatusError as error:
            if error.status in NO_ROUTE:
                return False
            raise
        return True

    async def context_length(self) -> int | None:
        """Longest prompt + completion, of a server whose /server_info does not tell; or None."""
        try:
            body = await self._repeat("GET", Path.MODELS, None)
        except StatusError as error:
            if error.status in NO_ROUTE:
                return None
            raise
        models = self._http.decoded(ModelsReply, body, Path.MODELS).data
        return models[0].max_model_len if models else None

    async def adopt(self, info: ServerInfo) -> None:
        """Connections for its slots, and ids of the policy's vocabulary. Not while it is paused.

        Raises:
            GenerationError: not retryable: it serves another vocabulary.
        """
        self._http.num_slots = info.max_running_requests or 0
        served = info.vocab_size or await self._ask_vocab_size()
        if served is None:
            return
        if self._policy_vocab_size not in (None, served):
            raise GenerationError(
                f"{self.url} serves a model of {served} token ids, but the policy has "
                f"{self._policy_vocab_size}: start the server with the policy's model",
                retryable=False,
            )
        self._vocab_size = served

    async def _ask_vocab_size(self) -> int | None:
        """No call of SGLang tells it, but the refusal of a bias for the id -1 names the range."""
        question = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "logit_bias": {"-1": 0.0}},
        }
        try:
            await self._http.call("POST", Path.GENERATE, question, self._control_timeout_s)
        except StatusError as error:
            found = _LAST_ID.search(str(error))
            if found is None and error.retryable:
                raise
            return int(found[1]) + 1 if found else None
        return None

    async def load(self) -> Load:
        """How busy it is; of all data-parallel ranks, of which we allow one."""
        body = await self._repeat("GET", Path.LOADS, None)
        reply = self._http.decoded(LoadsReply, body, Path.LOADS)
        if len(reply.loads) != 1:
            raise GenerationError(
                f"{self.url}{Path.LOADS}: {len(reply.loads)} ranks, not one", retryable=False
            )
        return reply.loads[0]

    async def flush_cache(self) -> None:
        """Drop cached prefixes; refused while requests hold KV."""
        await self._repeat("POST", Path.FLUSH_CACHE, None)

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding."""
        self._accepted(await self._repeat("POST", Path.PAUSE, PauseRequest(mode=mode)), Path.PAUSE)

    async def resume(self) -> None:
        """Go on decoding."""
        self._accepted(await self._repeat("POST", Path.CONTINUE, {}), Path.CONTINUE)

    async def begin_update(self) -> None:
        """Open an update session, where the server has sessions."""
        if self._has_update_sessions:
            await self._control(Path.BEGIN_UPDATE, {}, self._control_timeout_s)

    async def end_update(self, *, missing_ok: bool = False) -> None:
        """Close it; `missing_ok`: no open session is no error, nor is a server without sessions."""
        if not self._has_update_sessions:
            return
        try:
            await self._control(Path.END_UPDATE, {}, self._control_timeout_s, refusal_ok=missing_ok)
        except StatusError as error:
            if not missing_ok or error.status not in NO_ROUTE:
                raise
            self._has_update_sessions = False

    async def init_group(self, request: InitGroupRequest, *, timeout_s: float) -> None:
        """Join an update group; returns when all ranks have met."""
        await self._control(Path.INIT_GROUP, request, timeout_s)

    async def destroy_group(self, group_name: str) -> None:
        """Leave it; an unknown group is no error."""
        request = DestroyGroupRequest(group_name=group_name)
        await self._control(Path.DESTROY_GROUP, request, self._control_timeout_s, refusal_ok=True)

    async def update_from_distributed(
        self, request: UpdateFromDistributedRequest, *, timeout_s: float
    ) -> None:
        """Receive one bucket."""
        await self._control(Path.UPDATE_FROM_DISTRIBUTED, request, timeout_s)

    async def update_from_disk(self, request: UpdateFromDiskRequest, *, timeout_s: float) -> None:
        """Load a directory of safetensors."""
        await self._control(Path.UPDATE_FROM_DISK, request, timeout_s)

    async def checksums(self) -> Checksums | None:
        """Of all weights and of each tensor; None: the server is older than the call.

        Raises:
            GenerationError: also when a server that has the call gives none.
        """
        if not self._has_checker:
            return None
        try:
            body = await self._repeat("POST", Path.WEIGHTS_CHECKER, WeightsCheckerRequest())
        except StatusError as error:
            if error.status not in NO_ROUTE:
                raise
            self._has_checker = False
            logger.warning(
                "%s has no %s (SGLang 0.5.14 has it, 0.5.8 does not): it gives no checksum and no "
                "names of its tensors, so that only the probe tells whether an update arrived",
                self.url,
                Path.WEIGHTS_CHECKER,
            )
            return None
        reply = self._http.decoded(WeightsCheckerReply, body, Path.WEIGHTS_CHECKER)
        if not reply.success or reply.per_engine_checksum is None:
            raise GenerationError(
                f"{self.url}{Path.WEIGHTS_CHECKER}: no checksum: {reply.message}", retryable=False
            )
        tensors: dict[str, list[str]] = {}
        for rank in reply.ranks:
            for name, checksum in rank.checksums.items():
                tensors.setdefault(name, []).append(checksum)
        return Checksums(
            total=reply.per_engine_checksum,
            tensors={name: " ".join(parts) for name, parts in tensors.items()},
        )

    async def close(self) -> None:
        """Close connections: calls under way and later ones fail at once."""
        if self._asked is not None:
            self._asked.cancel()
        await self._http.close()

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if self._vocab_size is None:
            raise GenerationError(f"the vocabulary of {self.url} is not known", retryable=False)
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            found = f"{min(token_ids)} to {max(token_ids)}" if token_ids else "none"
            raise GenerationError(
                f"prompt ids must be in [0, {self._vocab_size}), the vocabulary of {self.url}; "
                f"got {found}",
                retryable=False,
            )

    async def _control(
        self, path: Path, request: Any, timeout_s: float, *, refusal_ok: bool = False
    ) -> None:
        """A call that answers `{"success", "message"}`; `refusal_ok`: a 400 is as good as a yes."""
        try:
            body = await self._http.call("POST", path, request, timeout_s)
        except StatusError as error:
            if refusal_ok and error.status == 400:
                return
            raise
        self._accepted(body, path, refusal_ok=refusal_ok)

    def _accepted(self, body: bytes, path: Path, *, refusal_ok: bool = False) -> None:
        # some calls of some versions answer with an empty or a plain-text body and status 200
        if not body.startswith(b"{"):
            return
        reply = self._http.decoded(_Answer, body, path)
        if not reply.success and not refusal_ok:
            raise GenerationError(f"{self.url}{path}: {reply.message}", retryable=False)

    async def _repeat(self, method: str, path: Path, request: Any) -> bytes:
        """A control call that may arrive twice."""
        return await self._http.repeat(method, path, request, self._control_timeout_s)


def _name_last_id(meta: MetaInfo, token_ids: Sequence[int], last_id: int) -> None:
    """SGLang calls the last id of its vocabulary 0 among a prompt's log-probs, which are right."""
    pairs = meta.input_token_logprobs
    if len(pairs) == len(token_ids) and last_id in token_ids:
        meta.input_token_logprobs = [
            (logprob, last_id if (sent, named) == (last_id, 0) else named, text)
            for sent, (logprob, named, text) in zip(token_ids, pairs, strict=True)
        ]
