"""Request and reply over one ROUTER and many DEALERs.

Delivery is at least once: a try that is not answered in time, or whose connection broke, is sent
again under a new id, so every request must be idempotent. Replies to earlier tries are discarded by
their id. Each socket belongs to the event loop that first used it. Knows what a request and a
reply are, not what they mean.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from async_grpo.errors import CodecError, ConfigError, PeerLost, RpcTimeout, VersionMismatch
from async_grpo.replay_api.base import Error, ErrorCode, Message
from async_grpo.replay_api.protocol import Reply, Request
from async_grpo.transport import envelope
from async_grpo.transport.group_header import Frame
from async_grpo.transport.loop_socket import LoopSocket
from async_grpo.transport.sockets import common_options, is_large, set_options, taken

logger = logging.getLogger(__name__)

_MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request, and where its reply goes."""

    peer: bytes
    """the connection; stays the same when it is re-established"""
    request_id: int
    request: Request
    payload: list[Frame]


class RpcServer:
    """The one ROUTER. All methods belong to one event loop; no send ever blocks it.

    Attributes:
        address: where it listens, with the port that the system chose.
        num_malformed: messages that were not a request.
    """

    def __init__(self, address: str, *, max_frame_bytes: int) -> None:
        """Bind.

        Args:
            address: `tcp://host:port` (port 0: chosen by the system) or `ipc://path`.
            max_frame_bytes: a peer that sends a larger frame is disconnected.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._max_frame_bytes = max(max_frame_bytes, envelope.MAX_ENVELOPE_BYTES)
        self._context = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        self._socket = LoopSocket(router)
        set_options(router, common_options(address))
        set_options(
            router,
            {
                # A reply to a peer that is gone is an error we see, not a silent drop.
                zmq.ROUTER_MANDATORY: 1,
                # A peer that reconnects before we noticed its loss takes its name over.
                zmq.ROUTER_HANDOVER: 1,
                zmq.MAXMSGSIZE: self._max_frame_bytes,
                zmq.SNDHWM: 64,
                zmq.RCVHWM: 0,  # see RpcClient.open; credit limits what honest peers send
            },
        )
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            self.close(linger_s=0)
            raise ConfigError(
                f"replay.address: cannot bind {address}: {error.strerror}; choose another port "
                "(`run` takes 0, for one that the system chooses)"
            ) from error
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_malformed = 0

    async def receive(self, timeout_s: float) -> list[Incoming]:
        """Requests that have arrived; waits at most `timeout_s` for the first."""
        messages = self._socket.arrived()
        if messages:
            await asyncio.sleep(0)  # a steady stream must not starve the loop's other tasks
        else:
            await self._socket.stir(max(0.0, timeout_s))
            messages = self._socket.arrived()
        opened = [self._open(frames) for frames in messages]
        return [incoming for incoming in opened if incoming is not None]

    def reply(self, to: Incoming, body: Message, payload: Sequence[Frame] = ()) -> None:
        """Answer `to`. A peer that is gone or does not read loses the reply, and will ask again."""
        self._send(to.peer, to.request_id, body, payload)

    def close(self, *, linger_s: float) -> None:
        """Give replies under way `linger_s` to leave."""
        self._socket.close(linger_s=linger_s)
        self._context.term()

    def _open(self, frames: Sequence[zmq.Frame]) -> Incoming | None:
        """The request in `frames`; a bad one is refused, or ignored if it cannot be answered."""
        peer = frames[0].bytes
        request_id: int | None = None
        try:
            if len(frames) < 2:
                raise CodecError("a message without an envelope")
            request_id, body = envelope.open_envelope(frames[1].bytes)
            request = envelope.decode_request(body)
        except VersionMismatch as error:
            message, request_id = error.args
            self._refuse(peer, request_id, ErrorCode.WIRE_MISMATCH, message)
        except CodecError as error:
            self._refuse(peer, request_id, ErrorCode.BAD_REQUEST, str(error))
        else:
            return Incoming(peer, request_id, request, [taken(frame) for frame in frames[2:]])
        return None

    def _refuse(self, peer: bytes, request_id: int | None, code: ErrorCode, message: str) -> None:
        self.num_malformed += 1
        if self.num_malformed.bit_count() == 1:  # 1st, 2nd, 4th, ...: a flood must not fill the log
            logger.warning(
                "malformed message no. %d from %s: %.200s", self.num_malformed, peer.hex(), message
            )
        if request_id is not None:
            body = Error(code=code, message=message[:_MAX_ERROR_CHARACTERS])
            self._send(peer, request_id, body, ())

    def _send(self, peer: bytes, request_id: int, body: Message, payload: Sequence[Frame]) -> None:
        frames = [envelope.encode(request_id, body), *payload]
        envelope.check_sizes(frames, self._max_frame_bytes)
        try:
            if not self._socket.send_now([peer, *frames], copy=not is_large(payload)):
                logger.warning("%s does not read its replies; dropped one", peer.hex())
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.debug("%s is gone; dropped its reply", peer.hex())


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply and the frames that came with it."""

    reply: Reply
    payload: list[Frame]


@dataclass(slots=True)
class _Try:
    """One sending of a request. The result is None when its connection broke."""

    answer: "asyncio.Future[Answer | None]"
    sent: bool = field(default=False)


class RpcClient:
    """One DEALER. `open` it on the event loop that will use it; other loops are refused."""

    def __init__(self, address: str, *, identity: str, max_frame_bytes: int) -> None:
        self.peer = f"replay server at {address}"
        self._address = address
        self._identity = identity.encode()
        self._max_frame_bytes = max(max_frame_bytes, envelope.MAX_ENVELOPE_BYTES)
        self._ids = itertools.count(1)
        self._tries: dict[int, _Try] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Start connecting; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        dealer = self._context.socket(zmq.DEALER)
        self._socket = LoopSocket(dealer)
        set_options(dealer, common_options(self._address))
        set_options(
            dealer,
            {
                zmq.IDENTITY: self._identity,
                # 1 would throw away replies that had arrived when the connection broke. At 0 a try
                # that nobody hears is heard late, by the next server: requests are idempotent.
                zmq.IMMEDIATE: 0,
                zmq.LINGER: 0,  # whoever wants a reply has awaited it
                zmq.MAXMSGSIZE: self._max_frame_bytes,
                zmq.RECONNECT_IVL: 100,
                zmq.RECONNECT_IVL_MAX: 2000,
                zmq.SNDHWM: 16,
                # No limit: there are never more replies than calls. At a limit libzmq stops to
                # read, and if the peer is lost meanwhile its heartbeat timer aborts the process.
                zmq.RCVHWM: 0,
            },
        )
        self._monitor = LoopSocket(dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        dealer.connect(self._address)
        self._tasks = [
            self._loop.create_task(self._receive(), name=f"receive {self.peer}"),
            self._loop.create_task(self._watch_connection(), name=f"monitor {self.peer}"),
        ]

    async def close(self) -> None:
        """Stop. Calls that wait for an answer raise PeerLost; end them before, if you care."""
        if self._loop is None:
            return
        self._loop = None
        for attempt in self._tries.values():
            if not attempt.answer.done():
                attempt.answer.set_exception(self._closed())
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # also where the closing itself is cancelled
            self._monitor.close(linger_s=0)
            self._socket.close(linger_s=0)
            self._context.term()

    async def call(
        self,
        request: Request,
        *,
        timeout_s: float,
        try_timeout_s: float,
        payload: Sequence[Frame] = (),
    ) -> Answer:
        """The reply to `request`, which is sent again until there is one.

        Args:
            request: idempotent.
            timeout_s: all tries together.
            try_timeout_s: one try; on top of the wait that a long poll asks for.
            payload: frames that follow; must not be written to any more.

        Raises:
            RpcTimeout: no reply in time.
            VersionMismatch: the peer runs another wire version.
            PeerLost: the client was closed meanwhile.
            CodecError: a frame is larger than the peer accepts; nothing was sent.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise RuntimeError(f"{self.peer}: call from an event loop that does not own the socket")
        envelope.check_sizes(payload, self._max_frame_bytes)
        deadline = loop.time() + timeout_s
        for pause_s in backoff():
            remaining_s = deadline - loop.time()
            if remaining_s <= 0:
                break
            answer = await self._try(request, payload, min(remaining_s, try_timeout_s))
            if answer is not None:
                return answer
            logger.info("%s: %s not answered, trying again", self.peer, type(request).__name__)
            await asyncio.sleep(max(0.0, min(pause_s, deadline - loop.time())))
            if self._loop is None:
                raise self._closed()
        raise RpcTimeout(self.peer, type(request).__name__, timeout_s)

    def _closed(self) -> PeerLost:
        return PeerLost(f"{self.peer}: this end closed the connection")

    async def _try(
        self, request: Request, payload: Sequence[Frame], timeout_s: float
    ) -> Answer | None:
        request_id = next(self._ids)
        attempt = _Try(asyncio.get_running_loop().create_future())
        self._tries[request_id] = attempt
        frames = [envelope.encode(request_id, request), *payload]
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send(frames, copy=not is_large(payload))
                attempt.sent = True
                return await attempt.answer
        except TimeoutError:
            return None
        finally:
            del self._tries[request_id]

    async def _receive(self) -> None:
        while True:
            self._hand_out()
            await self._socket.stir()

    def _hand_out(self) -> None:
        """Give all replies that have arrived to those who wait for them."""
        while messages := self._socket.arrived():
            for frames in messages:
                self._hand_out_one(frames)

    def _hand_out_one(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            request_id, body = envelope.open_envelope(frames[0].bytes)
            reply = envelope.decode_reply(body)
        except CodecError as error:
            logger.warning("%s sent what this release cannot read: %s", self.peer, error)
        except VersionMismatch as error:
            message, request_id = error.args
            if (answer := self._awaited(request_id)) is not None:
                answer.set_exception(VersionMismatch(f"{self.peer}: {message}"))
        else:
            if (answer := self._awaited(request_id)) is not None:
                answer.set_result(Answer(reply, [taken(frame) for frame in frames[1:]]))

    def _awaited(self, request_id: int) -> "asyncio.Future[Answer | None] | None":
        """Where the reply goes; None: it answers a try that is over."""
        attempt = self._tries.get(request_id)
        return None if attempt is None or attempt.answer.done() else attempt.answer

    async def _watch_connection(self) -> None:
        """What was sent over a connection that is lost may be lost too: send it again."""
        while True:
            if not self._monitor.arrived():
                await self._monitor.stir()
                continue
            logger.info("%s: connection lost, reconnecting", self.peer)
            # A server that ends closes right behind its last replies, which are answers too.
            self._hand_out()
            for attempt in self._tries.values():
                if attempt.sent and not attempt.answer.done():
                    attempt.answer.set_result(None)


def backoff(first_s: float = 0.05, most_s: float = 2.0) -> Iterator[float]:
    """Endless pauses between tries: doubling, capped, each cut by up to half at random."""
    pause_s = first_s
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, most_s)
