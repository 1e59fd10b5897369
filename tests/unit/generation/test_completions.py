import math

import numpy as np
import pytest

from async_grpo.engine_api import GenerateReply, MetaInfo, WeightVersionSpan
from async_grpo.errors import GenerationError
from async_grpo.generation.completions import (
    NOTHING,
    join_parts,
    part_from_reply,
)
from async_grpo.generation.names import GivenNames, Holder, UnknownWeights
from async_grpo.types import FinishReason, Segment, WeightsName

HOLDER = Holder("run", "gen/0")
V3, V4, V5 = WeightsName(1, 3), WeightsName(1, 4), WeightsName(1, 5)


def served(name):
    """`1.3` as the engine calls it; whole names and others' stay as they are."""
    return f"{HOLDER}:{name}" if name[0].isdigit() else name


def reply(ids=(5, 6, 7), logprobs=(-0.1, -0.2, -0.3), spans=(("1.3", 0, 3),), **meta):
    values = {
        "finish_reason": {"type": "stop"},
        "completion_tokens": len(ids),
        "output_token_logprobs": [
            (logprob, token, None) for logprob, token in zip(logprobs, ids, strict=False)
        ],
        "weight_version": "1.3",
        "weight_versions": [
            WeightVersionSpan(version=served(v), start=s, end=e) for v, s, e in spans
        ],
    } | meta
    values["weight_version"] = served(values["weight_version"])
    return GenerateReply(output_ids=list(ids), meta_info=MetaInfo(**values))


def part(answer, kept=(), num_late=0):
    """With the weights in `kept` requests went on with the KV they had."""
    names = GivenNames(HOLDER)
    for weights in (V3, V4, V5):
        names.give(weights)
        names.received(weights, kv_kept=weights in kept)
    return part_from_reply(
        answer,
        prompt_weights=V3,
        names=names,
        num_late_tokens=num_late,
    )


def segments(answer, kept=(), num_late=0):
    return [(s.weights, s.num_tokens, s.kv_mixed) for s in part(answer, kept, num_late).segments]


def test_a_plain_reply():
    made = part(reply())
    assert made.token_ids == [5, 6, 7]
    assert made.logprobs == [-0.1, -0.2, -0.3]
    assert made.finish_reason is FinishReason.STOP
    assert made.segments == [Segment(weights=V3, num_tokens=3)]


def test_an_aborted_reply_keeps_what_it_has():
    made = part(reply(finish_reason={"type": "abort", "message": "Aborted"}))
    assert (made.token_ids, made.finish_reason) == ([5, 6, 7], None)
    empty = GenerateReply(meta_info=MetaInfo(finish_reason={"type": "abort"}))
    assert part(empty) == NOTHING
    assert part(reply(ids=(), logprobs=(), spans=())) == NOTHING


@pytest.mark.parametrize(
    ("spans", "kept", "expected"),
    [
        ([("1.3", 0, 1), ("1.4", 1, 3)], {V4}, [(V3, 1, False), (V4, 2, True)]),
        ([("1.3", 0, 1), ("1.4", 1, 3)], {}, [(V3, 1, False), (V4, 2, False)]),
        # a prompt that was sent under 1.3 and begun under 1.4
        ([("1.4", 0, 3)], {V4}, [(V4, 3, True)]),
        ([("1.4", 0, 3)], {}, [(V4, 3, False)]),
        # the newest update decides
        (
            [("1.3", 0, 1), ("1.4", 1, 2), ("1.5", 2, 3)],
            {V4},
            [(V3, 1, False), (V4, 1, True), (V5, 1, False)],
        ),
        (
            [("1.3", 0, 1), ("1.4", 1, 2), ("1.5", 2, 3)],
            {V5},
            [(V3, 1, False), (V4, 1, False), (V5, 1, True)],
        ),
    ],
)
def test_kv_is_mixed_where_the_newest_update_kept_it(spans, kept, expected):
    assert segments(reply(spans=spans, num_retractions=2), kept) == expected


@pytest.mark.parametrize(
    ("spans", "kept", "expected"),
    [
        ([("1.3", 0, 3)], {V4}, [(V3, 3, False)]),
        ([("1.3", 0, 1), ("1.4", 1, 3)], {V4}, [(V3, 2, False), (V4, 1, True)]),
        # recomputed: the token under way was counted before the switch
        ([("1.3", 0, 1), ("1.4", 1, 3)], {}, [(V3, 1, False), (V4, 2, False)]),
        # nothing but the late token came of the new weights
        ([("1.3", 0, 2), ("1.4", 2, 3)], {V4}, [(V3, 3, False)]),
        ([("1.3", 0, 1), ("1.4", 1, 2), ("1.5", 2, 3)], {V4}, [(V3, 2, False), (V5, 1, False)]),
        (
            [("1.3", 0, 1), ("1.4", 1, 2), ("1.5", 2, 3)],
            {V4, V5},
            [(V3, 2, False), (V4, 1, True)],
        ),
        # perhaps sampled before the switch: it counts as older, and as mixed
        ([("1.4", 0, 3)], {V4}, [(V3, 1, True), (V4, 2, True)]),
    ],
)
def test_a_token_under_way_at_an_in_place_update_is_of_the_weights_before(spans, kept, expected):
    assert segments(reply(spans=spans, num_retractions=2), kept, num_late=1) == expected


def test_an_engine_that_did_not_recompute_is_not_believed():
    spans = [("1.3", 0, 1), ("1.4", 1, 2), ("1.5", 2, 3)]
    assert segments(reply(spans=spans, num_retractions=1)) == [
        (V3, 1, False),
        (V4, 1, True),
        (V5, 1, True),
    ]


def test_without_spans_the_oldest_weights_that_it_can_have_been_count():
    """Row 18; B044: one tag on a request that an update may have crossed."""
    assert segments(reply(spans=())) == [(V3, 3, False)]
    assert segments(reply(spans=(), weight_version="1.4")) == [(V3, 3, True)]
    with pytest.raises(UnknownWeights):
        part(reply(spans=(), weight_version="default"))


def test_parts_are_joined_exactly():
    first = part(reply(finish_reason={"type": "abort"}))
    second = part(reply((8, 9), (-0.4, -0.5), (("1.3", 0, 1), ("1.4", 1, 2)), num_retractions=1))
    made = join_parts(
        [first, NOTHING, second],
        prompt_token_ids=np.array([1, 2], dtype=np.int32),
        finish_reason=FinishReason.LENGTH,
        temperature=0.7,
    )
    assert made.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert made.token_ids.dtype == np.int32
    assert made.behavior_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])
    assert made.behavior_logprobs.dtype == np.float32
    assert made.segments == [Segment(weights=V3, num_tokens=4), Segment(weights=V4, num_tokens=1)]
    assert (made.finish_reason, made.temperature) == (FinishReason.LENGTH, 0.7)
    assert made.prompt_token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("finish_reason", [{"type": "stop"}, {"type": "abort"}])
@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": (-0.1, -0.2)},
        {"completion_tokens": 4},
        {"logprobs": (-0.1, None, -0.3)},
        {"logprobs": (-0.1, -0.2, math.nan)},
        {"logprobs": (-0.1, -0.2, -math.inf)},
        {"spans": (("1.3", 0, 2),)},
        {"spans": (("1.3", 0, 1), ("1.4", 2, 3))},
        {"spans": (("1.3", 1, 3),)},
        {"spans": (("1.3", 0, 4),)},
        {"output_token_logprobs": [(-0.1, 5, None), (-0.2, 9, None), (-0.3, 7, None)]},
    ],
    ids=str,
)
def test_a_reply_that_does_not_add_up_is_refused_for_good(finish_reason, changes):
    with pytest.raises(GenerationError) as caught:
        part(reply(finish_reason=finish_reason, **changes))
    assert not caught.value.retryable


@pytest.mark.parametrize("finish_reason", [None, {"type": "error"}])
def test_an_unknown_end_is_refused(finish_reason):
    with pytest.raises(GenerationError, match="finish reason"):
        part(reply(finish_reason=finish_reason))


def test_tokens_of_unknown_weights_say_that_the_engine_needs_a_sync():
    with pytest.raises(UnknownWeights):
        part(reply(spans=(("default", 0, 3),)))


def test_b051_b060_tokens_are_of_the_weights_that_sampled_them_whatever_was_sent_or_asked():
    """Sent under 1.3 as request 210, it waited until 1.4 was there."""
    made = part(reply(spans=[("1.4", 0, 3)], id="210-1-0"))
    assert made.segments == [Segment(weights=V4, num_tokens=3)]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other-77:gen/0:1.3", r"'other-77:gen/0:1.3': it is driven by run other-77 .* run run"),
        ("run:gen/1:1.3", "driven by gen/1 of this run"),
        ("run:gen/0:1.6", "which this life of the engine was not given"),
        ("run:gen/0:none", "which this life of the engine was not given"),
        ("1.3", "which run run has not given it"),
        ("default", "which run run has not given it"),
    ],
)
@pytest.mark.parametrize("start", [0, 2])
def test_no_token_is_believed_of_weights_that_this_engine_was_not_given(name, says, start):
    """Two runs on one server: names of another run, of another slot, of versions to come."""
    whole = f"{HOLDER}:1.3"
    spans = [(whole, 0, start), (name, start, 3)] if start else [(name, 0, 3)]
    answer = reply()
    answer.meta_info.weight_versions = [
        WeightVersionSpan(version=v, start=s, end=e) for v, s, e in spans
    ]
    with pytest.raises(UnknownWeights, match=says) as caught:
        part(answer)
    foreign = name.startswith(("other", "run:gen/1"))
    assert (caught.value.holder is not None) == foreign


def test_a_question_in_the_name_changes_nothing():
    """Another run asks who drives the server, in the middle of a request."""
    spans = [("1.3", 0, 1), ("1.3?other-77:gen/0", 1, 2), ("1.4?other-77:gen/0", 2, 3)]
    made = segments(reply(spans=spans), {V4}, num_late=0)
    assert made == [(V3, 1, False), (V3, 1, False), (V4, 1, True)]
