"""Client of one inference server: SGLang's HTTP API, spoken by SGLang and the embedded engine.

Turns every failure into a GenerationError that says whether another try may help. Sends no token
id outside the vocabulary: one such id ends a real server. Knows nothing of groups, weights or
routing.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.engine_api import (
    AbortRequest,
    DestroyGroupRequest,
    GenerateReply,
    GenerateRequest,
    InitGroupRequest,
    Load,
    LoadsReply,
    ModelInfo,
    Path,
    PauseMode,
    PauseRequest,
    ServerInfo,
    UpdateFromDistributedRequest,
    WeightsCheckerReply,
    WeightsCheckerRequest,
)
from async_grpo.errors import GenerationError

Decoded = TypeVar("Decoded")

_RETRYABLE_STATUS = frozenset({408, 425, 429})
"""Besides 5xx: overload and time-outs."""
_MAX_DETAIL = 500
"""Characters of an error body that are worth showing."""


class _Answer(msgspec.Struct):
    """`engine_api.ControlReply`, but calls that cannot fail (pause, continue) omit `success`."""

    success: bool = True
    message: str = ""


_encode = msgspec.json.Encoder().encode


class HttpEngineClient:
    """`interfaces.EngineClient` over HTTP. Use it on one event loop.

    Args:
        url: `http://host:port` of the server.
        control_timeout_s: deadline of calls that take none.
        vocab_size: of the policy, for a server that does not tell its own by /server_info.
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
        self._control_timeout_s = control_timeout_s
        self._vocab_size = vocab_size
        self._keys = keys or EngineKeys()
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._decode_generate = msgspec.json.Decoder(GenerateReply)

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> GenerateReply:
        """One completion.

        Raises:
            GenerationError: the server refused, failed or did not answer in time; or an id is
                outside the vocabulary, and was not sent.
        """
        self._check_ids(request.input_ids)
        body = await self._call("POST", Path.GENERATE, request, timeout_s)
        return self._decoded(self._decode_generate, body, Path.GENERATE)

    async def abort(self, rid: str) -> None:
        """End a request early; it then returns its partial output. Unknown ids are no error."""
        await self._call("POST", Path.ABORT, AbortRequest(rid=rid), self._control_timeout_s)

    async def model_info(self) -> ModelInfo:
        """Model and weight_version."""
        body = await self._call("GET", Path.MODEL_INFO, None, self._control_timeout_s)
        return self._decoded(msgspec.json.Decoder(ModelInfo), body, Path.MODEL_INFO)

    async def server_info(self, *, timeout_s: float) -> ServerInfo:
        """Liveness and sizes."""
        body = await self._call("GET", Path.SERVER_INFO, None, timeout_s)
        info = self._decoded(msgspec.json.Decoder(ServerInfo), body, Path.SERVER_INFO)
        if info.vocab_size is not None:
            self._vocab_size = info.vocab_size
        return info

    async def load(self) -> Load:
        """How busy it is; of all data-parallel ranks, of which we allow one."""
        body = await self._call("GET", Path.LOADS, None, self._control_timeout_s)
        reply = self._decoded(msgspec.json.Decoder(LoadsReply), body, Path.LOADS)
        if len(reply.loads) != 1:
            raise GenerationError(
                f"{self.url}{Path.LOADS}: {len(reply.loads)} ranks, not one", retryable=False
            )
        return reply.loads[0]

    async def flush_cache(self) -> None:
        """Drop cached prefixes; refused while requests hold KV."""
        await self._call("POST", Path.FLUSH_CACHE, None, self._control_timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding."""
        await self._control(Path.PAUSE, PauseRequest(mode=mode), self._control_timeout_s)

    async def resume(self) -> None:
        """Go on decoding."""
        await self._control(Path.CONTINUE, {}, self._control_timeout_s)

    async def begin_update(self) -> None:
        """Open an update session."""
        await self._control(Path.BEGIN_UPDATE, {}, self._control_timeout_s)

    async def end_update(self, *, missing_ok: bool = False) -> None:
        """Close it; `missing_ok`: no open session is no error."""
        await self._control(Path.END_UPDATE, {}, self._control_timeout_s, refusal_ok=missing_ok)

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

    async def checksum(self) -> str:
        """Checksum over all weights.

        Raises:
            GenerationError: also when the server gives none.
        """
        body = await self._call(
            "POST", Path.WEIGHTS_CHECKER, WeightsCheckerRequest(), self._control_timeout_s
        )
        reply = self._decoded(msgspec.json.Decoder(WeightsCheckerReply), body, Path.WEIGHTS_CHECKER)
        if not reply.success or reply.per_engine_checksum is None:
            raise GenerationError(
                f"{self.url}{Path.WEIGHTS_CHECKER}: no checksum: {reply.message}", retryable=False
            )
        return reply.per_engine_checksum

    async def close(self) -> None:
        """Close connections: calls under way and later ones fail at once."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

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
            body = await self._call("POST", path, request, timeout_s)
        except GenerationError as error:
            if refusal_ok and not error.retryable:
                return
            raise
        # some calls of some versions answer with an empty or a plain-text body and status 200
        if not body.startswith(b"{"):
            return
        reply = self._decoded(msgspec.json.Decoder(_Answer), body, path)
        if not reply.success and not refusal_ok:
            raise GenerationError(f"{self.url}{path}: {reply.message}", retryable=False)

    async def _call(self, method: str, path: Path, request: Any, timeout_s: float) -> bytes:
        """Body of a 200 reply."""
        if self._closed:
            raise GenerationError(f"{self.url}{path}: the client is closed", retryable=True)
        if self._session is None:
            # created here: a session belongs to the running loop; no limit, the router has one
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        data = None if request is None else _encode(request)
        headers = {"Content-Type": "application/json"}
        if key := self._keys.for_path(path):
            headers["Authorization"] = f"Bearer {key}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self.url + path, data=data, headers=headers
                ) as response,
            ):
                body = await response.read()
                status = response.status
        except TimeoutError as error:
            raise GenerationError(
                f"{self.url}{path} did not answer within {timeout_s:g} s", retryable=True
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise GenerationError(
                f"{self.url}{path}: {type(error).__name__}: {error}", retryable=True
            ) from error
        if status != 200:
            detail = body[:_MAX_DETAIL].decode("utf-8", "replace")
            raise GenerationError(
                f"{self.url}{path}: HTTP {status}: {detail}",
                retryable=status >= 500 or status in _RETRYABLE_STATUS,
            )
        return body

    def _decoded(self, decoder: msgspec.json.Decoder[Decoded], body: bytes, path: Path) -> Decoded:
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise GenerationError(
                f"{self.url}{path}: unreadable reply: {error}", retryable=False
            ) from error
