"""First frame of every message: wire version, request id and one strictly decoded body.

Payload frames, if any, follow it untouched. Knows nothing of sockets.
"""

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from async_grpo.errors import CodecError, VersionMismatch
from async_grpo.replay_api.base import WIRE_VERSION, Message
from async_grpo.replay_api.protocol import Reply, Request
from async_grpo.replay_parts import Struct
from async_grpo.transport.group_header import Frame

MAX_ENVELOPE_BYTES = 16 << 20
"""Room for the bucket plan of a very large model; everything else is far below it."""

_Body = TypeVar("_Body")
_RequestId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Envelope(Struct, frozen=True, kw_only=True):
    wire_version: int
    request_id: _RequestId
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_request_decoder: "msgspec.msgpack.Decoder[Request]" = msgspec.msgpack.Decoder(Request)
_reply_decoder: "msgspec.msgpack.Decoder[Reply]" = msgspec.msgpack.Decoder(Reply)


def encode(request_id: int, body: Message) -> bytes:
    """The envelope frame of `body`."""
    raw = msgspec.Raw(_encoder.encode(body))
    return _encoder.encode(_Envelope(wire_version=WIRE_VERSION, request_id=request_id, body=raw))


def open_envelope(frame: Frame) -> tuple[int, msgspec.Raw]:
    """(request id, undecoded body).

    Raises:
        CodecError: not an envelope; there is no id to answer to.
        VersionMismatch: from a peer of another wire version; `args` are (message, request id).
    """
    if memoryview(frame).nbytes > MAX_ENVELOPE_BYTES:
        raise CodecError(f"envelope of {memoryview(frame).nbytes} bytes")
    envelope = _decode(_envelope_decoder, frame)
    if envelope.wire_version != WIRE_VERSION:
        raise VersionMismatch(
            f"wire version {envelope.wire_version}, expected {WIRE_VERSION}: "
            "run the same release of async_grpo everywhere",
            envelope.request_id,
        )
    return envelope.request_id, envelope.body


def decode_request(body: msgspec.Raw) -> Request:
    """The request in an envelope. Raises CodecError."""
    return _decode(_request_decoder, body)


def decode_reply(body: msgspec.Raw) -> Reply:
    """The reply in an envelope. Raises CodecError."""
    return _decode(_reply_decoder, body)


def check_sizes(frames: Sequence[Frame], max_frame_bytes: int) -> None:
    """Refuse what the receiver's socket would drop, connection and all, without telling anyone.

    Raises:
        CodecError: a frame is larger than `max_frame_bytes`.
    """
    for frame in frames:
        if (size := memoryview(frame).nbytes) > max_frame_bytes:
            raise CodecError(f"a frame of {size} bytes exceeds the limit of {max_frame_bytes}")


def _decode(decoder: "msgspec.msgpack.Decoder[_Body]", data: Frame | msgspec.Raw) -> _Body:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(str(error)) from error
