"""Frame 0 of a rollout group: its schema, and the way from and to `types.RolloutGroup`.

Knows the lengths of the arrays that follow, but not the arrays.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated

import msgspec

from async_grpo.errors import CodecError
from async_grpo.replay_api.base import WIRE_VERSION
from async_grpo.replay_parts import Struct
from async_grpo.types import (
    Completion,
    FinishReason,
    RolloutGroup,
    Segment,
    TicketKind,
    WeightsName,
)

Frame = bytes | memoryview

MAX_HEADER_BYTES = 4 << 20
MAX_ARRAYS = 16
NUM_FIXED_FRAMES = 3

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class SegmentHeader(Struct, frozen=True, kw_only=True):
    """A run of tokens; see `types.Segment`."""

    weights: tuple[_Count, _Count] | None
    num_tokens: _Count
    trainable: bool
    kv_mixed: bool


class SequenceHeader(Struct, frozen=True, kw_only=True):
    """One sequence; its ids and log-probs follow those of the sequence before it."""

    num_prompt_tokens: _Positive
    num_tokens: _Positive
    segments: Annotated[list[SegmentHeader], msgspec.Meta(min_length=1)]
    finish_reason: FinishReason
    temperature: float


class RolloutHeader(Struct, frozen=True, kw_only=True):
    """One scored completion; several sequences when it had several turns."""

    reward: float
    reward_parts: Annotated[dict[_Name, float], msgspec.Meta(max_length=64)]
    sequences: Annotated[list[SequenceHeader], msgspec.Meta(min_length=1)]


class ArrayHeader(Struct, frozen=True, kw_only=True):
    """A named per-token array of all sequences, concatenated along the token axis."""

    name: _Name
    dtype: _Name
    shape: Annotated[list[_Positive], msgspec.Meta(min_length=1, max_length=4)]
    """of the whole frame; the first number is the group's sampled tokens"""


class GroupHeader(Struct, frozen=True, kw_only=True):
    """Frame 0."""

    wire_version: int
    group_id: _Count
    attempt: _Count
    prompt_index: _Count
    kind: TicketKind
    generator: _Name
    engine_id: _Name
    started_s: float
    sampled_ago_s: float
    rollouts: Annotated[list[RolloutHeader], msgspec.Meta(min_length=1)]
    arrays: Annotated[list[ArrayHeader], msgspec.Meta(max_length=MAX_ARRAYS)]

    def sequences(self) -> Iterator[SequenceHeader]:
        """All sequences in wire order."""
        return chain.from_iterable(rollout.sequences for rollout in self.rollouts)


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(GroupHeader, strict=True)


def header_of(group: RolloutGroup, arrays: list[ArrayHeader]) -> GroupHeader:
    """Numbers become plain Python ones here: msgpack knows no numpy scalars."""
    return GroupHeader(
        wire_version=WIRE_VERSION,
        group_id=int(group.group_id),
        attempt=int(group.attempt),
        prompt_index=int(group.prompt_index),
        kind=group.kind,
        generator=group.generator,
        engine_id=group.engine_id,
        started_s=float(group.started_s),
        sampled_ago_s=float(group.sampled_ago_s),
        rollouts=[
            RolloutHeader(
                reward=float(rollout.reward),
                reward_parts={name: float(part) for name, part in rollout.reward_parts.items()},
                sequences=[_sequence_header(sequence) for sequence in rollout.sequences],
            )
            for rollout in group.rollouts
        ],
        arrays=arrays,
    )


def _sequence_header(sequence: Completion) -> SequenceHeader:
    return SequenceHeader(
        num_prompt_tokens=int(sequence.prompt_token_ids.shape[0]),
        num_tokens=sequence.num_tokens,
        segments=[
            SegmentHeader(
                weights=None if run.weights is None else (int(run.weights[0]), int(run.weights[1])),
                num_tokens=int(run.num_tokens),
                trainable=bool(run.trainable),
                kv_mixed=bool(run.kv_mixed),
            )
            for run in sequence.segments
        ],
        finish_reason=sequence.finish_reason,
        temperature=float(sequence.temperature),
    )


def segment_of(run: SegmentHeader) -> Segment:
    """The segment that `run` describes."""
    weights = None if run.weights is None else WeightsName(*run.weights)
    return Segment(weights, run.num_tokens, run.trainable, run.kv_mixed)


def encode_header(header: GroupHeader) -> bytes:
    """Frame 0."""
    return _encoder.encode(header)


def decode_header(frames: Sequence[Frame]) -> GroupHeader:
    """The header in frame 0, and as many frames as it says.

    Raises:
        CodecError: the header breaks the schema, or its version or number of frames is wrong.
    """
    if len(frames) < NUM_FIXED_FRAMES:
        raise CodecError(f"{len(frames)} frames, expected at least {NUM_FIXED_FRAMES}")
    size = memoryview(frames[0]).nbytes
    if size > MAX_HEADER_BYTES:
        raise CodecError(f"header of {size} bytes exceeds {MAX_HEADER_BYTES}")
    try:
        header = _header_decoder.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"header: {error}") from error
    if header.wire_version != WIRE_VERSION:
        raise CodecError(f"group of wire version {header.wire_version}, expected {WIRE_VERSION}")
    if len(frames) != NUM_FIXED_FRAMES + len(header.arrays):
        raise CodecError(f"{len(frames)} frames for {len(header.arrays)} named arrays")
    return header
