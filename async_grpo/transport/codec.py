"""A rollout group as frames: a msgpack header and flat little-endian arrays.

    frame 0    header (`GroupHeader`): str keys, strict schema, `wire_version`
    frame 1    int32 ids, sequence by sequence: the prompt's, then the completion's
    frame 2    float32 behavior log-probs of the completions' tokens, sequence by sequence
    frame 3+   one per further named per-token array, in the header's order

A version is stored once per segment, not per token. Knows nothing of sockets or of the replay
server. No pickle, and no length is trusted before it is checked against the frames.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from async_grpo.errors import CodecError
from async_grpo.replay_parts import GroupSummary
from async_grpo.transport.group_header import (
    NUM_FIXED_FRAMES,
    ArrayHeader,
    Frame,
    GroupHeader,
    decode_header,
    encode_header,
    header_of,
    segment_of,
)
from async_grpo.types import (
    Completion,
    Float32Array,
    Int32Array,
    Rollout,
    RolloutGroup,
    WeightsName,
)

AnyArray = npt.NDArray[Any]

LOGPROB_TOLERANCE = 1e-4
"""A log-prob may exceed 0 by this much (nats): engines round."""
_IDS = np.dtype("<i4")
_LOGPROBS = np.dtype("<f4")
_ARRAY_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
        "float16", "float32", "float64",
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GroupLimits:
    """What `inspect_group` refuses beyond."""

    max_bytes: int
    """all frames together"""
    max_completions: int
    """rollouts of the group"""
    max_tokens: int
    """sampled tokens of one sequence"""
    vocab_size: int | None = None
    """ids must be below it; None: not known here"""


def num_bytes(frames: Sequence[Frame]) -> int:
    """Bytes of all frames: what credits, limits and the buffer count."""
    return sum(memoryview(frame).nbytes for frame in frames)


def encode_group(group: RolloutGroup) -> list[Frame]:
    """Frames of `group`; arrays are copied once, so the caller may reuse its own.

    Raises:
        CodecError: lengths or dtypes of a sequence's arrays disagree, or its named arrays differ
            from those of the other sequences. Values are checked by `inspect_group`.
    """
    sequences = [sequence for rollout in group.rollouts for sequence in rollout.sequences]
    if not sequences:
        raise CodecError(f"group {group.group_id} has no sequences")
    for sequence in sequences:
        _check_lengths(sequence)
    names = list(sequences[0].arrays)
    if any(list(sequence.arrays) != names for sequence in sequences):
        raise CodecError(f"the sequences of group {group.group_id} differ in their named arrays")
    id_parts = chain.from_iterable((item.prompt_token_ids, item.token_ids) for item in sequences)
    flat = [
        _concatenate("ids", list(id_parts), _IDS),
        _concatenate("behavior log-probs", [s.behavior_logprobs for s in sequences], _LOGPROBS),
    ]
    arrays = []
    for name in names:
        parts = [sequence.arrays[name] for sequence in sequences]
        dtype = parts[0].dtype.name
        if dtype not in _ARRAY_DTYPES:
            raise CodecError(f"array {name!r}: dtype {dtype} is not one of {list(_ARRAY_DTYPES)}")
        whole = _concatenate(f"array {name!r}", parts, _ARRAY_DTYPES[dtype])
        arrays.append(ArrayHeader(name=name, dtype=dtype, shape=list(whole.shape)))
        flat.append(whole)
    header = encode_header(header_of(group, arrays))
    return [header, *(array.reshape(-1).view(np.uint8).data for array in flat)]


def decode_group(frames: Sequence[Frame]) -> RolloutGroup:
    """The group in `frames`. Its arrays are read-only views: they keep the frames alive.

    Raises:
        CodecError: the frames do not form a group. Values are not checked; the replay server did.
    """
    header = decode_header(frames)
    ids, logprobs, arrays = _views(header, frames)
    rollouts, id_at, token_at = [], 0, 0
    for rollout in header.rollouts:
        sequences = []
        for item in rollout.sequences:
            prompt_end = id_at + item.num_prompt_tokens
            token_end = token_at + item.num_tokens
            sequences.append(
                Completion(
                    prompt_token_ids=ids[id_at:prompt_end],
                    token_ids=ids[prompt_end : prompt_end + item.num_tokens],
                    behavior_logprobs=logprobs[token_at:token_end],
                    segments=[segment_of(run) for run in item.segments],
                    finish_reason=item.finish_reason,
                    temperature=item.temperature,
                    arrays={name: whole[token_at:token_end] for name, whole in arrays.items()},
                )
            )
            id_at, token_at = prompt_end + item.num_tokens, token_end
        rollouts.append(Rollout(sequences, rollout.reward, dict(rollout.reward_parts)))
    return RolloutGroup(
        group_id=header.group_id,
        attempt=header.attempt,
        prompt_index=header.prompt_index,
        rollouts=rollouts,
        kind=header.kind,
        generator=header.generator,
        engine_id=header.engine_id,
        started_s=header.started_s,
        sampled_ago_s=header.sampled_ago_s,
    )


def inspect_group(frames: Sequence[Frame], limits: GroupLimits) -> GroupSummary:
    """Check everything a stranger could have got wrong, without building the group.

    Raises:
        CodecError: with the reason, in words for the generator's log.
    """
    total = num_bytes(frames)
    if total > limits.max_bytes:
        raise CodecError(f"{total} bytes exceed the limit of {limits.max_bytes}")
    header = decode_header(frames)
    _check_header_values(header, limits)
    ids, logprobs, arrays = _views(header, frames)
    _check_array_values(ids, logprobs, arrays, limits)
    by_weights: dict[tuple[int, int], int] = {}
    for sequence in header.sequences():
        for run in sequence.segments:
            if run.weights is not None and run.trainable and run.num_tokens:
                by_weights[run.weights] = by_weights.get(run.weights, 0) + run.num_tokens
    if not by_weights:
        raise CodecError("no trainable token")
    return GroupSummary(
        group_id=header.group_id,
        attempt=header.attempt,
        num_bytes=total,
        num_completions=len(header.rollouts),
        num_tokens=int(logprobs.shape[0]),
        reward_sum=math.fsum(rollout.reward for rollout in header.rollouts),
        weights_tokens=[(WeightsName(*name), num) for name, num in sorted(by_weights.items())],
    )


def _check_lengths(sequence: Completion) -> None:
    tokens = sequence.token_ids.shape
    if len(tokens) != 1 or sequence.prompt_token_ids.ndim != 1:
        raise CodecError("ids must be one-dimensional")
    if sequence.behavior_logprobs.shape != tokens:
        raise CodecError(
            f"{sequence.behavior_logprobs.shape} behavior log-probs for {tokens} tokens"
        )
    for name, array in sequence.arrays.items():
        if array.shape[:1] != tokens:
            raise CodecError(f"array {name!r} has shape {array.shape} for {tokens} tokens")


def _concatenate(what: str, parts: Sequence[AnyArray], dtype: np.dtype[Any]) -> AnyArray:
    try:
        return np.concatenate(parts, dtype=dtype, casting="safe")
    except (TypeError, ValueError) as error:
        raise CodecError(f"{what} cannot be sent as {dtype.name}: {error}") from error


def _views(
    header: GroupHeader, frames: Sequence[Frame]
) -> tuple[Int32Array, Float32Array, Mapping[str, AnyArray]]:
    """Ids, log-probs and named arrays as read-only views, lengths checked against the header."""
    num_ids = num_tokens = 0
    for position, sequence in enumerate(header.sequences()):
        num_ids += sequence.num_prompt_tokens + sequence.num_tokens
        num_tokens += sequence.num_tokens
        in_segments = sum(run.num_tokens for run in sequence.segments)
        if in_segments != sequence.num_tokens:
            raise CodecError(
                f"sequence {position}: segments of {in_segments} tokens for {sequence.num_tokens}"
            )
    ids = _view("ids", frames[1], _IDS, [num_ids])
    logprobs = _view("behavior log-probs", frames[2], _LOGPROBS, [num_tokens])
    arrays: dict[str, AnyArray] = {}
    for item, frame in zip(header.arrays, frames[NUM_FIXED_FRAMES:], strict=True):
        if item.name in arrays:
            raise CodecError(f"array {item.name!r} comes twice")
        if item.dtype not in _ARRAY_DTYPES:
            raise CodecError(f"array {item.name!r}: unknown dtype {item.dtype!r}")
        if item.shape[0] != num_tokens:
            raise CodecError(f"array {item.name!r}: {item.shape} for {num_tokens} tokens")
        what = f"array {item.name!r}"
        arrays[item.name] = _view(what, frame, _ARRAY_DTYPES[item.dtype], item.shape)
    return ids, logprobs, arrays


def _view(what: str, frame: Frame, dtype: np.dtype[Any], shape: list[int]) -> AnyArray:
    expected = math.prod(shape) * dtype.itemsize
    size = memoryview(frame).nbytes
    if size != expected:
        raise CodecError(f"{what}: {size} bytes, the header says {expected}")
    array = np.frombuffer(frame, dtype=dtype).reshape(shape)
    array.flags.writeable = False
    return array


def _check_header_values(header: GroupHeader, limits: GroupLimits) -> None:
    if len(header.rollouts) > limits.max_completions:
        raise CodecError(f"{len(header.rollouts)} completions, limit {limits.max_completions}")
    times = (header.started_s, header.sampled_ago_s)
    if not all(math.isfinite(value) and value >= 0 for value in times):
        raise CodecError(f"durations {times} must be finite and >= 0")
    for position, rollout in enumerate(header.rollouts):
        if not all(map(math.isfinite, (rollout.reward, *rollout.reward_parts.values()))):
            raise CodecError(f"rollout {position}: the reward is not finite")
        for sequence in rollout.sequences:
            if sequence.num_tokens > limits.max_tokens:
                raise CodecError(f"{sequence.num_tokens} tokens, limit {limits.max_tokens}")
            if not (math.isfinite(sequence.temperature) and sequence.temperature > 0):
                raise CodecError(f"temperature {sequence.temperature} must be finite and > 0")


def _check_array_values(
    ids: Int32Array, logprobs: Float32Array, arrays: Mapping[str, AnyArray], limits: GroupLimits
) -> None:
    if ids.min() < 0:
        raise CodecError(f"negative token id {ids.min()}")
    if limits.vocab_size is not None and ids.max() >= limits.vocab_size:
        raise CodecError(f"token id {ids.max()} is not below the vocabulary {limits.vocab_size}")
    with np.errstate(invalid="ignore"):
        lowest, highest = float(logprobs.min()), float(logprobs.max())
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        raise CodecError("a behavior log-prob is not finite")
    if highest > LOGPROB_TOLERANCE:
        raise CodecError(f"behavior log-prob {highest} is above 0")
    for name, array in arrays.items():
        if array.dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
            raise CodecError(f"array {name!r}: a boolean is neither 0 nor 1")
