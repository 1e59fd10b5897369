"""Replies of /generate, checked, and joined to a Completion.

The behavior log-probs and the weights of each token come from here; a reply that is not exactly
right is refused, never repaired. A request that was ended early gives a part; the rest is sampled
by another request, whose prompt ends with that part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_grpo.engine_api import GenerateReply, MetaInfo
from async_grpo.errors import GenerationError
from async_grpo.generation.names import GivenNames, UnknownWeights
from async_grpo.types import Completion, FinishReason, Int32Array, Segment, WeightsName


@dataclass(slots=True, frozen=True)
class Part:
    """The tokens that one request sampled; none if it was ended before its first."""

    token_ids: list[int]
    logprobs: list[float]
    segments: list[Segment]
    finish_reason: FinishReason | None
    """None: the request was ended early, by an abort or by the engine"""


NOTHING = Part([], [], [], None)


def part_from_reply(
    reply: GenerateReply,
    *,
    prompt_weights: WeightsName,
    names: GivenNames,
    num_late_tokens: int = 0,
) -> Part:
    """The tokens in `reply`.

    Args:
        reply: of a request with `return_logprob`.
        prompt_weights: the engine's weights when the request was sent.
        names: of the engine.
        num_late_tokens: of the engine: tokens which the weights before had sampled, and which it
            counts to those of an update that kept KV.

    Raises:
        UnknownWeights: a span names weights that the engine was not given.
        GenerationError: ids, log-probs, counts or spans disagree, or a log-prob is not finite.
    """
    meta = reply.meta_info
    kind = (meta.finish_reason or {}).get("type")
    if kind not in ("stop", "length", "abort"):
        raise _refused(meta.id, f"unknown finish reason {meta.finish_reason!r}")
    num_tokens = len(reply.output_ids)
    if not num_tokens:
        return NOTHING  # aborts in the waiting queue may lack every other field
    logprobs = _logprobs(reply)
    return Part(
        token_ids=reply.output_ids,
        logprobs=logprobs,
        segments=_segments(meta, num_tokens, prompt_weights, names, num_late_tokens)
        if meta.weight_versions
        else [_segment_without_spans(meta, num_tokens, prompt_weights, names)],
        finish_reason=None if kind == "abort" else FinishReason(kind),
    )


def join_parts(
    parts: Sequence[Part],
    *,
    prompt_token_ids: Int32Array,
    finish_reason: FinishReason,
    temperature: float,
) -> Completion:
    """The completion that `parts` make up, in order.

    Args:
        parts: each sampled after the prompt and all parts before it; one has tokens.
        prompt_token_ids: [num_prompt_tokens] int32, of the first.
        finish_reason: of the whole.
        temperature: of all.
    """
    segments: list[Segment] = []
    for segment in (segment for part in parts for segment in part.segments):
        last = segments[-1] if segments else None
        if last is not None and (last.weights, last.kv_mixed) == (
            segment.weights,
            segment.kv_mixed,
        ):
            segments[-1] = Segment(
                weights=last.weights,
                num_tokens=last.num_tokens + segment.num_tokens,
                kv_mixed=last.kv_mixed,
            )
        else:
            segments.append(segment)
    return Completion(
        prompt_token_ids=prompt_token_ids,
        token_ids=np.array([token for part in parts for token in part.token_ids], dtype=np.int32),
        behavior_logprobs=np.array(
            [logprob for part in parts for logprob in part.logprobs], dtype=np.float32
        ),
        segments=segments,
        finish_reason=finish_reason,
        temperature=temperature,
    )


def _logprobs(reply: GenerateReply) -> list[float]:
    meta = reply.meta_info
    pairs = meta.output_token_logprobs
    num_tokens = len(reply.output_ids)
    if not num_tokens == len(pairs) == meta.completion_tokens:
        raise _refused(
            meta.id,
            f"{num_tokens} ids, {len(pairs)} log-probs, completion_tokens {meta.completion_tokens}",
        )
    logprobs = []
    for position, (logprob, token_id, _) in enumerate(pairs):
        if token_id != reply.output_ids[position]:
            raise _refused(meta.id, f"the log-prob at {position} is of another token")
        if logprob is None or not math.isfinite(logprob):
            raise _refused(meta.id, f"the log-prob at {position} is {logprob}")
        logprobs.append(logprob)
    return logprobs


def _segment_without_spans(
    meta: MetaInfo, num_tokens: int, prompt_weights: WeightsName, names: GivenNames
) -> Segment:
    """Of a server that names only the weights of the last token: the oldest that it can have been.

    The log-probs are right all the same; the staleness is an upper bound.
    """
    last = _weights(meta, meta.weight_version, names)
    return Segment(weights=prompt_weights, num_tokens=num_tokens, kv_mixed=last != prompt_weights)


def _segments(
    meta: MetaInfo,
    num_tokens: int,
    prompt_weights: WeightsName,
    names: GivenNames,
    num_late_tokens: int,
) -> list[Segment]:
    """Spans as segments; `kv_mixed` where the prefix may hold KV entries of other weights.

    The newest update decides: either it left KV as it was, or all of it was computed afresh.
    """
    starts: list[tuple[int, WeightsName, bool]] = []
    position = num_recomputed = 0
    weights_before, kv_mixed = prompt_weights, False
    for span in meta.weight_versions:
        if span.start != position or span.end <= span.start:
            raise _refused(
                meta.id, f"weight span [{span.start}, {span.end}) after {position} tokens"
            )
        weights, start = _weights(meta, span.version, names), position
        if weights != weights_before:
            kv_mixed = names.keeps_kv(weights)
            num_recomputed += position > 0 and not kv_mixed
            start += num_late_tokens if kv_mixed else 0
        starts.append((start, weights, kv_mixed))
        weights_before, position = weights, span.end
    if position != num_tokens:
        raise _refused(meta.id, f"weight spans cover {position} of {num_tokens} tokens")
    if starts[0][0]:
        # sent before an update, begun in its course: which weights sampled the head is not known
        starts.insert(0, (0, prompt_weights, True))
    ends = [start for start, *_ in starts[1:]] + [num_tokens]
    segments = [
        Segment(weights=weights, num_tokens=min(end, num_tokens) - start, kv_mixed=kv_mixed)
        for (start, weights, kv_mixed), end in zip(starts, ends, strict=True)
        if start < min(end, num_tokens)
    ]
    if num_recomputed > meta.num_retractions:
        # the engine did not do as it was told, so nothing after the first switch is sure
        segments[1:] = [
            Segment(weights=segment.weights, num_tokens=segment.num_tokens, kv_mixed=True)
            for segment in segments[1:]
        ]
    return segments


def _weights(meta: MetaInfo, version: str, names: GivenNames) -> WeightsName:
    try:
        return names.read(version)
    except UnknownWeights as error:
        what = f"request {meta.id}: tokens sampled under {error}"
        raise UnknownWeights(what, error.holder) from error


def _refused(rid: str, problem: str) -> GenerationError:
    return GenerationError(f"reply to request {rid} refused: {problem}", retryable=False)
