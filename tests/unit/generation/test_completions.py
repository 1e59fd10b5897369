import math

import numpy as np
import pytest

from async_grpo.engine_api import GenerateReply, MetaInfo, WeightVersionSpan
from async_grpo.errors import GenerationError
from async_grpo.generation.completions import Aborted, UnknownWeights, completion_from_reply
from async_grpo.types import FinishReason, WeightsName

V3, V4 = WeightsName(1, 3), WeightsName(1, 4)


def reply(ids=(5, 6, 7), logprobs=(-0.1, -0.2, -0.3), spans=(("1.3", 0, 3),), **meta):
    values = {
        "finish_reason": {"type": "stop"},
        "completion_tokens": len(ids),
        "output_token_logprobs": [
            (logprob, token, None) for logprob, token in zip(logprobs, ids, strict=False)
        ],
        "weight_version": "1.3",
        "weight_versions": [WeightVersionSpan(version=v, start=s, end=e) for v, s, e in spans],
    }
    return GenerateReply(output_ids=list(ids), meta_info=MetaInfo(**(values | meta)))


def completion(answer):
    return completion_from_reply(
        answer,
        prompt_token_ids=np.array([1, 2], dtype=np.int32),
        prompt_weights=V3,
        temperature=0.7,
    )


def test_a_plain_reply():
    made = completion(reply())
    assert made.token_ids.tolist() == [5, 6, 7]
    assert made.token_ids.dtype == np.int32
    assert made.behavior_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert made.behavior_logprobs.dtype == np.float32
    assert made.finish_reason is FinishReason.STOP
    assert made.temperature == 0.7
    assert [(s.weights, s.num_tokens, s.kv_mixed) for s in made.segments] == [(V3, 3, False)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([("1.3", 0, 1), ("1.4", 1, 3)], [(V3, 1, False), (V4, 2, True)]),
        ([("1.4", 0, 3)], [(V4, 3, True)]),
        (
            [("1.3", 0, 1), ("1.4", 1, 2), ("1.3", 2, 3)],
            [(V3, 1, False), (V4, 1, True), (V3, 1, True)],
        ),
    ],
)
def test_kv_is_mixed_once_the_prefix_may_be_of_other_weights(spans, expected):
    made = completion(reply(spans=spans))
    assert [(s.weights, s.num_tokens, s.kv_mixed) for s in made.segments] == expected


def test_without_spans_one_version_is_enough_if_it_did_not_move():
    assert completion(reply(spans=())).segments[0].num_tokens == 3
    with pytest.raises(GenerationError, match="spans cover 0 of 3"):
        completion(reply(spans=(), weight_version="1.4"))


@pytest.mark.parametrize(
    "answer",
    [
        reply(logprobs=(-0.1, -0.2)),
        reply(completion_tokens=4),
        reply(logprobs=(-0.1, None, -0.3)),
        reply(logprobs=(-0.1, -0.2, math.nan)),
        reply(logprobs=(-0.1, -0.2, -math.inf)),
        reply(spans=(("1.3", 0, 2),)),
        reply(spans=(("1.3", 0, 1), ("1.4", 2, 3))),
        reply(spans=(("1.3", 1, 3),)),
        reply(spans=(("1.3", 0, 4),)),
        reply(finish_reason=None),
        reply(finish_reason={"type": "error"}),
        reply(output_token_logprobs=[(-0.1, 5, None), (-0.2, 9, None), (-0.3, 7, None)]),
    ],
)
def test_a_reply_that_does_not_add_up_is_refused_for_good(answer):
    with pytest.raises(GenerationError) as caught:
        completion(answer)
    assert not caught.value.retryable


@pytest.mark.parametrize(
    "answer",
    [
        reply(finish_reason={"type": "abort", "message": "Aborted"}),
        reply(ids=(), logprobs=(), spans=(), finish_reason={"type": "abort"}),
        reply(ids=(), logprobs=(), spans=()),
    ],
)
def test_an_aborted_reply_is_never_a_completion(answer):
    with pytest.raises(Aborted) as caught:
        completion(answer)
    assert caught.value.retryable


def test_tokens_of_unknown_weights_say_that_the_engine_needs_a_sync():
    with pytest.raises(UnknownWeights):
        completion(reply(spans=(("default", 0, 3),)))
