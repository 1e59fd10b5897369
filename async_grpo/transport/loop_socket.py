"""A ZeroMQ socket on an event loop.

`zmq.asyncio` makes futures, timers and a dozen flag objects of every message: half the processor
time of a small call. Here the library's descriptor wakes whoever waits, and messages are read in
batches. Two traits of that descriptor shape this module: it stirs once for any number of
arrivals, so read until there is nothing more before you wait; and every use of the socket may
swallow a stir that was meant for another, so every use rings for the others.
"""

import asyncio
from collections.abc import Sequence

import zmq

from async_grpo.transport.group_header import Frame

_NOBLOCK = int(zmq.NOBLOCK)
_MAX_BATCH = 64
"""Messages taken in one go before timers are looked at."""


class LoopSocket:
    """Belongs to the event loop that first waits on it; no method blocks that loop."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stirred = asyncio.Event()
        self._room = asyncio.Event()
        self._sending = asyncio.Lock()

    @property
    def descriptor(self) -> int:
        """Readable when something may have arrived."""
        return int(self._socket.FD)

    def arrived(self) -> list[list[zmq.Frame]]:
        """Some messages that can be read without waiting; none: there are none."""
        messages: list[list[zmq.Frame]] = []
        try:
            while len(messages) < _MAX_BATCH:
                messages.append(self._socket.recv_multipart(_NOBLOCK, copy=False))
        except zmq.Again:
            pass
        self._room.set()
        return messages

    async def stir(self, timeout_s: float | None = None) -> None:
        """Until something may have arrived since `arrived` returned none, or `timeout_s` is over.

        There must be no `await` between the two. One task at a time.
        """
        self._stirred.clear()
        await self._wait(self._stirred, timeout_s)

    def send_now(self, frames: Sequence[Frame], *, copy: bool) -> bool:
        """Whether there was room for the message. Raises ZMQError (a ROUTER's peer is gone)."""
        try:
            self._socket.send_multipart(frames, _NOBLOCK, copy=copy)
        except zmq.Again:
            return False
        finally:
            self._stirred.set()
        return True

    async def send(self, frames: Sequence[Frame], *, copy: bool) -> None:
        """Send as soon as there is room; the caller has a deadline. First come, first served."""
        async with self._sending:
            while not self.send_now(frames, copy=copy):
                self._room.clear()
                # unlike a failed send, this makes the library take notice of what was read
                events = int(self._socket.getsockopt(zmq.EVENTS))
                if not events & zmq.POLLOUT:
                    await self._wait(self._room, None)

    def close(self, *, linger_s: float) -> None:
        """Give what is under way `linger_s` to leave; nobody may wait any more."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
            self._loop = None
        self._socket.close(linger=round(linger_s * 1000))

    async def _wait(self, event: asyncio.Event, timeout_s: float | None) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.FD, self._ring)
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, event.set)
        try:
            await event.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _ring(self) -> None:
        self._stirred.set()
        self._room.set()
