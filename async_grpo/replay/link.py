"""A client's connection to the replay server: says hello, and says it again when asked to.

What a caller sees of a server that restarts is a late answer. Knows nothing of tickets.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import TypeVar

from async_grpo.config.schema import Config
from async_grpo.errors import (
    CodecError,
    ConfigError,
    PeerLost,
    RemoteError,
    RpcTimeout,
    VersionMismatch,
)
from async_grpo.replay.sessions import wait_s
from async_grpo.replay_api.base import Error, ErrorCode, Message
from async_grpo.replay_api.peers import Hello, HelloReply
from async_grpo.replay_api.protocol import Request
from async_grpo.replay_api.trainer import Fetch
from async_grpo.transport.codec import num_bytes
from async_grpo.transport.group_header import Frame
from async_grpo.transport.rpc import Answer, RpcClient, backoff

logger = logging.getLogger(__name__)

_SLOWEST_BYTES_PER_S = 10e6
"""A try may take this much longer per byte that it carries."""
_MISMATCH = (ErrorCode.WIRE_MISMATCH, ErrorCode.CONFIG_MISMATCH)

ReplyT = TypeVar("ReplyT", bound=Message)


class Link:
    """One connection of one process; event-loop thread only."""

    def __init__(self, config: Config, hello: Hello) -> None:
        address = config.replay.address
        if address.startswith("tcp://") and address.rpartition(":")[2] in ("0", "*", ""):
            raise ConfigError(
                f"replay.address is {address}: give the address that the replay server listens on "
                "(it writes it to replay/address in its run directory)"
            )
        self._hello_request = hello
        self._timeout_s = config.run.no_progress_timeout_s
        self._try_timeout_s = config.replay.request_timeout_s
        self._max_group_bytes = config.replay.max_group_bytes
        self._client = RpcClient(
            address,
            identity=f"{hello.instance}/{'bulk' if hello.bulk else 'control'}",
            max_frame_bytes=config.replay.max_group_bytes,
        )
        self._saying_hello = asyncio.Lock()
        self._welcome: HelloReply | None = None
        self._run_token = ""

    @property
    def peer(self) -> str:
        """The server, for messages."""
        return self._client.peer

    def open(self) -> None:
        """Start connecting; returns at once."""
        self._client.open()

    async def close(self) -> None:
        """Drop the connection."""
        await self._client.close()

    async def welcome(self, timeout_s: float | None = None) -> HelloReply:
        """The server's answer to the hello, which is said if need be.

        Raises:
            VersionMismatch: code, configuration or data set differ from the server's.
            RemoteError: refused for another reason.
            PeerLost: it serves another run than at the first hello.
            RpcTimeout: no server within `timeout_s`.
        """
        async with self._saying_hello:
            if self._welcome is None:
                answer = await self._call(self._hello_request, (), timeout_s)
                welcome = _expect(self.peer, answer, self._hello_request, HelloReply)
                if self._run_token not in ("", welcome.run_token):
                    raise PeerLost(
                        f"the {self.peer} serves run {welcome.run_token} now, and this process "
                        f"belongs to run {self._run_token}: start it again"
                    )
                self._welcome, self._run_token = welcome, welcome.run_token
            return self._welcome

    async def ask(
        self,
        request: Request,
        expected: type[ReplyT],
        *,
        payload: Sequence[Frame] = (),
        timeout_s: float | None = None,
    ) -> ReplyT:
        """The reply to `request`, through restarts of the server.

        Args:
            request: idempotent.
            expected: class of the reply.
            payload: frames that follow the request.
            timeout_s: all tries together; None: `run.no_progress_timeout_s`.

        Raises:
            RpcTimeout: no answer in time.
            VersionMismatch: the server was restarted with other code or configuration.
            RemoteError: the server refused.
        """
        answer = await self._answer(request, payload, timeout_s)
        return _expect(self.peer, answer, request, expected)

    async def ask_payload(self, request: Request, expected: type[Message]) -> list[Frame]:
        """The frames that came with the reply; else as `ask`."""
        answer = await self._answer(request, (), None)
        _expect(self.peer, answer, request, expected)
        return answer.payload

    async def _answer(
        self, request: Request, payload: Sequence[Frame], timeout_s: float | None
    ) -> Answer:
        loop = asyncio.get_running_loop()
        total_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = loop.time() + total_s
        for pause_s in backoff():
            welcome = await self.welcome(max(deadline - loop.time(), 0.0))
            answer = await self._call(request, payload, max(deadline - loop.time(), 0.0))
            reply = answer.reply
            if not (isinstance(reply, Error) and reply.code is ErrorCode.HELLO_REQUIRED):
                return answer
            logger.info("%s does not know us (any more): saying hello again", self.peer)
            if self._welcome is welcome:
                self._welcome = None
            if loop.time() + pause_s >= deadline:
                break
            await asyncio.sleep(pause_s)
        raise RpcTimeout(self.peer, type(request).__name__, total_s)

    async def _call(
        self, request: Request, payload: Sequence[Frame], timeout_s: float | None
    ) -> Answer:
        carried = self._max_group_bytes if isinstance(request, Fetch) else num_bytes(payload)
        return await self._client.call(
            request,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            try_timeout_s=self._try_timeout_s + wait_s(request) + carried / _SLOWEST_BYTES_PER_S,
            payload=payload,
        )


def _expect(peer: str, answer: Answer, request: Request, expected: type[ReplyT]) -> ReplyT:
    """The reply, which must be of the class that the protocol promises."""
    reply = answer.reply
    if isinstance(reply, expected):
        return reply
    operation = type(request).__name__
    if not isinstance(reply, Error):
        raise CodecError(f"{peer} answered {operation} with {type(reply).__name__}")
    if reply.code in _MISMATCH:
        raise VersionMismatch(f"{peer} refused us: {reply.message}")
    raise RemoteError(peer, operation, reply.code, reply.message)
