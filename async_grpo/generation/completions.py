"""A reply of /generate, checked and made into a Completion.

The behavior log-probs and the weights of each token come from here; a reply that is not exactly
right is refused, never repaired.
"""

import math

import numpy as np

from async_grpo.engine_api import GenerateReply, WeightVersionSpan
from async_grpo.errors import GenerationError
from async_grpo.types import Completion, FinishReason, Int32Array, Segment, WeightsName


class Aborted(GenerationError):  # noqa: N818 -- an outcome: the engine ended the request early
    """The request was ended early, by an abort or by the engine; its tokens are not trained."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class UnknownWeights(GenerationError):  # noqa: N818 -- an outcome: says what the engine must get
    """Tokens were sampled under weights that have no name of ours: the engine needs a sync."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


def completion_from_reply(
    reply: GenerateReply,
    *,
    prompt_token_ids: Int32Array,
    prompt_weights: WeightsName,
    temperature: float,
) -> Completion:
    """The completion in `reply`.

    Args:
        reply: of a request with `return_logprob`.
        prompt_token_ids: [num_prompt_tokens] int32.
        prompt_weights: the engine's weights when the request was sent; a completion that begins
            under others may rest on a prefix that was prefilled under these.
        temperature: of the request.

    Raises:
        Aborted: the request was ended early.
        UnknownWeights: a span names no weights of ours.
        GenerationError: ids, log-probs, counts or spans disagree, or a log-prob is not finite.
    """
    meta = reply.meta_info
    kind = (meta.finish_reason or {}).get("type")
    if kind == "abort":
        message = (meta.finish_reason or {}).get("message", "")
        raise Aborted(f"request {meta.id} was aborted by the engine: {message}")
    if kind not in ("stop", "length"):
        raise _refused(meta.id, f"unknown finish reason {meta.finish_reason!r}")
    pairs = meta.output_token_logprobs
    num_tokens = len(reply.output_ids)
    if not num_tokens:
        raise Aborted(f"request {meta.id} returned no token")
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
    spans = meta.weight_versions
    if not spans and meta.weight_version == str(prompt_weights):
        # no update came between request and reply, or the last token would have another version
        spans = [WeightVersionSpan(version=meta.weight_version, start=0, end=num_tokens)]
    return Completion(
        prompt_token_ids=prompt_token_ids,
        token_ids=np.array(reply.output_ids, dtype=np.int32),
        behavior_logprobs=np.array(logprobs, dtype=np.float32),
        segments=_segments(meta.id, spans, num_tokens, prompt_weights),
        finish_reason=FinishReason(kind),
        temperature=temperature,
    )


def _segments(
    rid: str, spans: list[WeightVersionSpan], num_tokens: int, prompt_weights: WeightsName
) -> list[Segment]:
    """Spans as segments.

    `kv_mixed` from the first token on whose prefix may hold KV entries of other weights.
    """
    segments: list[Segment] = []
    position = 0
    prefix_weights = {prompt_weights}
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise _refused(rid, f"weight span [{span.start}, {span.end}) after {position} tokens")
        weights = WeightsName.parse(span.version)
        if weights is None:
            raise UnknownWeights(f"request {rid}: tokens sampled under {span.version!r}")
        prefix_weights.add(weights)
        segments.append(
            Segment(
                weights=weights,
                num_tokens=span.end - span.start,
                kv_mixed=len(prefix_weights) > 1,
            )
        )
        position = span.end
    if position != num_tokens:
        raise _refused(rid, f"weight spans cover {position} of {num_tokens} tokens")
    return segments


def _refused(rid: str, problem: str) -> GenerationError:
    return GenerationError(f"reply to request {rid} refused: {problem}", retryable=False)
