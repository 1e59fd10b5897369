"""The group codec: round trips, refusals with a reason, and frames that no honest peer sends."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.errors import CodecError
from async_grpo.transport.codec import (
    GroupLimits,
    decode_group,
    encode_group,
    inspect_group,
    num_bytes,
)
from async_grpo.types import (
    Completion,
    FinishReason,
    Rollout,
    RolloutGroup,
    Segment,
    TicketKind,
    WeightsName,
)

LIMITS = GroupLimits(max_bytes=1 << 20, max_completions=8, max_tokens=64, vocab_size=50_000)
NAMES = st.builds(WeightsName, st.integers(1, 3), st.integers(0, 200))


@st.composite
def segments(draw: st.DrawFn, num_tokens: int) -> list[Segment]:
    cuts = sorted(draw(st.lists(st.integers(0, num_tokens), max_size=3)))
    lengths = np.diff([0, *cuts, num_tokens]).tolist()
    made = [
        Segment(draw(st.none() | NAMES), length, draw(st.booleans()), draw(st.booleans()))
        for length in lengths
    ]
    # every sequence has a token that can be trained
    longest = lengths.index(max(lengths))
    made[longest] = replace(made[longest], weights=draw(NAMES), trainable=True)
    return made


@st.composite
def completions(draw: st.DrawFn, array_names: list[str]) -> Completion:
    num_tokens = draw(st.integers(1, 20))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    arrays = {
        "experts": random.integers(0, 255, (num_tokens, 2, 3), dtype=np.uint8),
        "mask": random.integers(0, 2, num_tokens).astype(bool),
        "value": random.standard_normal(num_tokens),
    }
    return Completion(
        prompt_token_ids=random.integers(0, 50_000, draw(st.integers(1, 9)), dtype=np.int32),
        token_ids=random.integers(0, 50_000, num_tokens, dtype=np.int32),
        behavior_logprobs=-random.random(num_tokens, dtype=np.float32),
        segments=draw(segments(num_tokens)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        temperature=draw(st.floats(0.1, 2.0)),
        arrays={name: arrays[name] for name in array_names},
    )


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    names = draw(st.lists(st.sampled_from(["experts", "mask", "value"]), unique=True))
    finite = st.floats(-10, 10)
    rollouts = st.builds(
        Rollout,
        st.lists(completions(names), min_size=1, max_size=3),
        finite,
        st.dictionaries(st.text(max_size=10), finite, max_size=3),
    )
    return RolloutGroup(
        group_id=draw(st.integers(0, 2**40)),
        attempt=draw(st.integers(0, 100)),
        prompt_index=draw(st.integers(0, 2**31)),
        rollouts=draw(st.lists(rollouts, min_size=1, max_size=4)),
        kind=draw(st.sampled_from(TicketKind)),
        generator=draw(st.text(max_size=20)),
        engine_id="g0/0#1",
        started_s=draw(st.floats(0, 1e6)),
        sampled_ago_s=draw(st.floats(0, 1e6)),
    )


def assert_same(left: object, right: object) -> None:
    """Equal in every field, arrays included in dtype and shape."""
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, list):
        assert isinstance(right, list)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, dict):
        assert isinstance(right, dict)
        assert list(left) == list(right)
        assert_same(list(left.values()), list(right.values()))
    elif isinstance(left, RolloutGroup | Rollout | Completion):
        for name in left.__dataclass_fields__:
            assert_same(getattr(left, name), getattr(right, name))
    else:
        assert left == right


def a_completion(num_tokens: int) -> Completion:
    return Completion(
        prompt_token_ids=np.array([1, 2], dtype=np.int32),
        token_ids=np.arange(num_tokens, dtype=np.int32),
        behavior_logprobs=np.full(num_tokens, -0.5, dtype=np.float32),
        segments=[Segment(WeightsName(1, 7), num_tokens)],
        finish_reason=FinishReason.STOP,
        temperature=1.0,
    )


def a_group(num_tokens: int = 5) -> RolloutGroup:
    rollouts = [Rollout([a_completion(num_tokens)], reward) for reward in (1.0, 0.0)]
    return RolloutGroup(3, 1, 9, rollouts)


@given(groups())
@settings(max_examples=50, deadline=None)
def test_round_trip_changes_nothing(group):
    frames = encode_group(group)
    assert_same(decode_group(frames), group)
    assert_same(decode_group([bytes(frame) for frame in frames]), group)
    summary = inspect_group(frames, LIMITS)
    assert (summary.group_id, summary.attempt) == (group.group_id, group.attempt)
    assert summary.num_tokens == group.num_tokens
    assert summary.num_completions == len(group.rollouts)
    assert summary.num_bytes == num_bytes(frames)
    assert summary.reward_sum == pytest.approx(sum(rollout.reward for rollout in group.rollouts))
    assert summary.weights_tokens[0][0] == group.oldest_weights()
    by_weights: dict[WeightsName, int] = {}
    for rollout in group.rollouts:
        for sequence in rollout.sequences:
            for run in sequence.segments:
                if run.weights is not None and run.trainable and run.num_tokens:
                    by_weights[run.weights] = by_weights.get(run.weights, 0) + run.num_tokens
    assert dict(summary.weights_tokens) == by_weights


@given(
    groups(),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4000), st.binary(max_size=6)), max_size=4),
    st.sampled_from(["mutate", "truncate", "drop", "random"]),
)
@settings(max_examples=100, deadline=None)
def test_broken_frames_raise_codec_error_or_pass_whole(group, edits, how):
    frames = [bytearray(frame) for frame in encode_group(group)]
    for which, where, data in edits:
        frame = frames[which % len(frames)]
        where %= len(frame) + 1
        if how == "mutate":
            frame[where : where + len(data)] = data
        elif how == "truncate":
            del frame[where:]
        elif how == "random":
            frame[:] = data
        elif len(frames) > 1:
            frames.pop(which % len(frames))
    for reader in (lambda given: inspect_group(given, LIMITS), decode_group):
        try:
            reader([bytes(frame) for frame in frames])
        except CodecError:
            pass
        else:
            # what passes has consistent lengths, so decoding it is safe
            decode_group([bytes(frame) for frame in frames])


@given(st.lists(st.binary(max_size=200), max_size=5))
@settings(max_examples=200, deadline=None)
def test_random_frames_raise_codec_error(frames):
    with pytest.raises(CodecError):
        inspect_group(frames, LIMITS)
    with pytest.raises(CodecError):
        decode_group(frames)


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 200_000,
        b"\x81\xa4kind" + b"\x91" * 200_000,
        b"\x81\xa8rollouts\xdd\xff\xff\xff\xff",
    ],
)
def test_declared_lengths_and_nesting_are_not_trusted(header):
    with pytest.raises(CodecError, match="header"):
        decode_group([header, b"", b""])


def test_decoded_arrays_are_views_that_cannot_be_written():
    frames = encode_group(a_group())
    sequence = decode_group(frames).rollouts[0].sequences[0]
    for array in (sequence.token_ids, sequence.prompt_token_ids, sequence.behavior_logprobs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    whole = np.frombuffer(frames[1], dtype=np.int32)
    assert np.shares_memory(whole, sequence.token_ids)


def test_sender_may_reuse_its_arrays():
    group = a_group()
    frames = encode_group(group)
    group.rollouts[0].sequences[0].token_ids[:] = 99
    assert decode_group(frames).rollouts[0].sequences[0].token_ids.tolist() == [0, 1, 2, 3, 4]


def test_numpy_scalars_are_converted():
    group = a_group()
    group.group_id = np.int64(5)
    group.rollouts[0].reward = np.float32(0.25)
    group.rollouts[0].reward_parts = {"format": np.float64(0.25)}
    assert decode_group(encode_group(group)).rollouts[0].reward == 0.25


def first(group: RolloutGroup) -> Completion:
    return group.rollouts[0].sequences[0]


def with_logprob(value: float):
    def change(group: RolloutGroup) -> None:
        first(group).behavior_logprobs = np.array([-1, value, -1, -1, -1], dtype=np.float32)

    return change


def with_id(value: int):
    def change(group: RolloutGroup) -> None:
        first(group).token_ids = np.array([0, value, 2, 3, 4], dtype=np.int32)

    return change


def with_segments(*runs: Segment):
    def change(group: RolloutGroup) -> None:
        for rollout in group.rollouts:
            rollout.sequences[0].segments = list(runs)

    return change


def with_reward(value: float):
    def change(group: RolloutGroup) -> None:
        group.rollouts[0].reward = value

    return change


def with_part(value: float):
    def change(group: RolloutGroup) -> None:
        group.rollouts[0].reward_parts = {"format": value}

    return change


def with_temperature(value: float):
    def change(group: RolloutGroup) -> None:
        first(group).temperature = value

    return change


def with_more_completions(group: RolloutGroup) -> None:
    group.rollouts *= 5


W = WeightsName(1, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_logprob(float("nan")), "not finite"),
        (with_logprob(float("-inf")), "not finite"),
        (with_logprob(float("inf")), "not finite"),
        (with_logprob(0.3), "above 0"),
        (with_id(-1), "negative token id -1"),
        (with_id(50_000), "not below the vocabulary"),
        (with_reward(float("nan")), "reward is not finite"),
        (with_reward(float("inf")), "reward is not finite"),
        (with_part(float("nan")), "reward is not finite"),
        (with_temperature(0.0), "temperature"),
        (with_temperature(float("nan")), "temperature"),
        (with_segments(Segment(W, 4)), "segments of 4 tokens for 5"),
        (with_segments(Segment(None, 5)), "no trainable token"),
        (with_segments(Segment(W, 5, trainable=False)), "no trainable token"),
        (with_segments(), "header"),
        (with_segments(Segment(WeightsName(-1, 0), 5)), "header"),
        (with_more_completions, "10 completions, limit 8"),
    ],
)
def test_values_out_of_range_are_refused_with_the_reason(change, reason):
    group = a_group()
    change(group)
    with pytest.raises(CodecError, match=reason):
        inspect_group(encode_group(group), LIMITS)


def test_tiny_positive_logprob_is_rounding():
    group = a_group()
    with_logprob(5e-5)(group)
    assert inspect_group(encode_group(group), LIMITS).num_tokens == 10


def test_limits_of_bytes_and_tokens_are_kept():
    frames = encode_group(a_group())
    with pytest.raises(CodecError, match="bytes exceed the limit"):
        inspect_group(frames, replace(LIMITS, max_bytes=num_bytes(frames) - 1))
    with pytest.raises(CodecError, match="5 tokens, limit 4"):
        inspect_group(frames, replace(LIMITS, max_tokens=4))


def set_array(name: str, array: np.ndarray):
    def change(group: RolloutGroup) -> None:
        first(group).arrays = {name: array}

    return change


def set_field(name: str, value: object):
    def change(group: RolloutGroup) -> None:
        setattr(first(group), name, value)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_field("token_ids", np.arange(5)), "ids cannot be sent as int32"),
        (set_field("behavior_logprobs", np.zeros(5)), "log-probs cannot be sent as float32"),
        (set_field("behavior_logprobs", np.zeros(4, np.float32)), r"\(4,\) behavior log-probs"),
        (set_field("token_ids", np.zeros((5, 1), np.int32)), "one-dimensional"),
        (set_array("mask", np.zeros(5, bool)), "differ in their named arrays"),
        (set_array("mask", np.zeros(4, bool)), r"array 'mask' has shape \(4,\)"),
    ],
)
def test_encoder_refuses_arrays_that_disagree(change, reason):
    group = a_group()
    change(group)
    with pytest.raises(CodecError, match=reason):
        encode_group(group)


def test_object_array_is_refused():
    group = a_group()
    for rollout in group.rollouts:
        rollout.sequences[0].arrays = {"any": np.array([None] * 5)}
    with pytest.raises(CodecError, match="dtype object"):
        encode_group(group)


def test_group_without_sequences_is_refused():
    with pytest.raises(CodecError, match="no sequences"):
        encode_group(RolloutGroup(1, 1, 1, []))


def test_other_version_and_unknown_fields_are_refused():
    header, *arrays = encode_group(a_group())
    tree = msgspec.msgpack.decode(header)
    newer = msgspec.msgpack.encode({**tree, "wire_version": 99})
    with pytest.raises(CodecError, match="wire version 99"):
        decode_group([newer, *arrays])
    stranger = msgspec.msgpack.encode({**tree, "code": "import os"})
    with pytest.raises(CodecError, match="unknown field"):
        decode_group([stranger, *arrays])
