"""What the two ends of the wire set and do alike with their sockets and frames."""

from collections.abc import Mapping, Sequence

import zmq

from async_grpo.transport.group_header import Frame

ZERO_COPY_BYTES = 256 << 10
"""From this size on a message is sent without copying; below, copying is cheaper."""
_VIEW_BYTES = 64 << 10
"""Smaller received frames are copied: as views they would pin the library's read buffer."""
_COMMON_OPTIONS: Mapping[int, int | bytes] = {
    # A peer that says nothing for 6 s is disconnected; the i/o thread answers for a busy process.
    zmq.HEARTBEAT_IVL: 2000,
    zmq.HEARTBEAT_TIMEOUT: 6000,
    zmq.HEARTBEAT_TTL: 6000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}


def common_options(address: str) -> Mapping[int, int | bytes]:
    """Of both ends. An IPv6 address has brackets; a name is looked up as one of IPv4."""
    return {**_COMMON_OPTIONS, zmq.IPV6: int(address.startswith("tcp://["))}


def set_options(socket: "zmq.Socket[bytes]", options: Mapping[int, int | bytes]) -> None:
    """Set each option."""
    for option, value in options.items():
        socket.setsockopt(option, value)


def is_large(payload: Sequence[Frame]) -> bool:
    """Whether sending without a copy is cheaper."""
    return sum(memoryview(frame).nbytes for frame in payload) >= ZERO_COPY_BYTES


def taken(frame: zmq.Frame) -> Frame:
    """The content of a received frame; a large one is not copied."""
    return frame.buffer if len(frame) >= _VIEW_BYTES else frame.bytes
