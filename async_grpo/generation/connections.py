"""Connections to one inference server: a call, its deadline, its failure in words.

Requests that sample and control calls use connections apart, so that neither waits for the other.
A call whose connection broke is sent again only if twice is as good as once. Knows nothing of what
the calls mean.
"""

import asyncio
from typing import Any, TypeVar

import aiohttp
import msgspec

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.engine_api import Path
from async_grpo.errors import EngineSilent, GenerationError

Decoded = TypeVar("Decoded")

NO_ROUTE = frozenset({404, 405})
"""Statuses of a server that is older than the call."""
NUM_REPEATS = 2
"""Of a call that may be sent again, after its connection broke."""
FIRST_REPEAT_S = 0.05
IDLE_CONNECTION_S = 2.0
"""Connections idle for longer are not used again: SGLang closes them after 5 s, and a call that
meets the close is lost."""
_NEW_CONNECTION = frozenset({Path.INIT_GROUP, Path.UPDATE_FROM_DISTRIBUTED, Path.UPDATE_FROM_DISK})
"""Calls that get a connection of their own: one lost to a server's close of an idle connection
would cost the engine, since others wait in the collective and it cannot be sent again."""
_RETRYABLE_STATUS = frozenset({408, 425, 429})
"""Besides 5xx: overload and time-outs."""
_MAX_DETAIL = 500
"""Characters of an error body that are worth showing."""


class StatusError(GenerationError):
    """An answer with another status than 200."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message, retryable=status >= 500 or status in _RETRYABLE_STATUS)


class BrokenConnection(GenerationError):  # noqa: N818 -- an outcome: nobody knows what was done
    """The connection was there, and broke before the answer."""


_encode = msgspec.json.Encoder().encode


class Connections:
    """Calls to one server. One event loop owns it.

    Args:
        url: `http://host:port` of the server.
        keys: to send.

    Attributes:
        num_slots: connections for requests that sample; 0: no limit. Set it before the first.
    """

    def __init__(self, url: str, keys: EngineKeys) -> None:
        self.url = url
        self.num_slots = 0
        self._keys = keys
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._closed = False

    async def call(
        self, method: str, path: Path, request: Any, timeout_s: float, *, fresh: bool = False
    ) -> bytes:
        """Body of a 200 reply; `fresh`: over a connection that nothing else uses.

        Raises:
            StatusError: another status.
            BrokenConnection: no reply.
            GenerationError: no connection, or no reply in time.
        """
        if self._closed:
            raise GenerationError(f"{self.url}{path}: the client is closed", retryable=True)
        session = self._session(path, fresh=fresh)
        data = None if request is None else _encode(request)
        headers = {"Content-Type": "application/json"}
        if key := self._keys.for_path(path):
            headers["Authorization"] = f"Bearer {key}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                session.request(method, self.url + path, data=data, headers=headers) as response,
            ):
                body = await response.read()
                status = response.status
        except TimeoutError as error:
            raise self.silent(path, timeout_s) from error
        except (aiohttp.ClientError, OSError) as error:
            kind = BrokenConnection if _is_broken(error) else GenerationError
            raise kind(
                f"{self.url}{path}: {type(error).__name__}: {error}", retryable=True
            ) from error
        if status != 200:
            detail = body[:_MAX_DETAIL].decode("utf-8", "replace")
            raise StatusError(f"{self.url}{path}: HTTP {status}: {detail}", status)
        return body

    async def repeat(self, method: str, path: Path, request: Any, timeout_s: float) -> bytes:
        """`call` of something that may arrive twice: sent again if its connection breaks."""
        pause_s = FIRST_REPEAT_S
        for _ in range(NUM_REPEATS):
            try:
                return await self.call(method, path, request, timeout_s)
            except BrokenConnection:
                await asyncio.sleep(pause_s)
                pause_s *= 2
        return await self.call(method, path, request, timeout_s)

    def decoded(self, kind: type[Decoded], body: bytes, path: Path) -> Decoded:
        """`body` as `kind`.

        Raises:
            GenerationError: it is none.
        """
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise GenerationError(
                f"{self.url}{path}: unreadable reply: {error}", retryable=False
            ) from error

    def silent(self, path: Path, timeout_s: float) -> EngineSilent:
        """The error of a server that does not answer."""
        return EngineSilent(f"{self.url}{path} did not answer within {timeout_s:g} s")

    async def close(self) -> None:
        """Calls under way and later ones fail at once."""
        self._closed = True
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()

    def _session(self, path: Path, *, fresh: bool) -> aiohttp.ClientSession:
        """Of the calls of one sort; created here, since a session belongs to the running loop."""
        if path is Path.GENERATE:
            return self._sessions.get("samples") or self._open("samples", limit=self.num_slots)
        if fresh or path in _NEW_CONNECTION:
            return self._sessions.get("new") or self._open("new", limit=0, force_close=True)
        return self._sessions.get("control") or self._open("control", limit=0)

    def _open(self, sort: str, *, limit: int, force_close: bool = False) -> aiohttp.ClientSession:
        if force_close:
            connector = aiohttp.TCPConnector(limit=limit, force_close=True)
        else:
            connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=IDLE_CONNECTION_S)
        self._sessions[sort] = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )
        return self._sessions[sort]


def _is_broken(error: Exception) -> bool:
    refused = isinstance(error, aiohttp.ClientConnectorError)
    return isinstance(error, aiohttp.ClientConnectionError | OSError) and not refused
