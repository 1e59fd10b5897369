"""Build the reply of /generate from what was sampled. Knows no model and no queue."""

from typing import Any

from async_grpo.engine.batching import Sampled
from async_grpo.engine_api import GenerateReply, GenerateRequest, MetaInfo, WeightVersionSpan

ABORTED = {"type": "abort", "message": "Aborted"}
ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}


def make_reply(
    request: GenerateRequest,
    sampled: Sampled,
    *,
    rid: str,
    eos_token_ids: frozenset[int],
    prompt_logprobs: list[float] | None,
    latency_s: float,
    finish_reason: dict[str, Any] | None = None,
) -> GenerateReply:
    """The reply; `text` stays empty, since ids are the truth and the engine has no tokenizer.

    Args:
        request: what was asked for.
        sampled: what came of it.
        rid: request id to name.
        eos_token_ids: tokens that end this completion.
        prompt_logprobs: [num_prompt_tokens - 1] of ids 1..; None if there are none to give.
        latency_s: since the request came.
        finish_reason: of an abort; None: told by the last token.

    Raises:
        ValueError: ids and log-probs differ in number.
    """
    ids = sampled.token_ids
    meta = MetaInfo(
        id=rid,
        finish_reason=finish_reason or _finish_reason(ids, eos_token_ids),
        prompt_tokens=len(request.input_ids),
        completion_tokens=len(ids),
        weight_version=sampled.version,
        weight_versions=version_spans(sampled),
        num_retractions=sampled.num_retractions,
        e2e_latency=latency_s,
    )
    if request.return_logprob:
        meta.output_token_logprobs = [
            (logprob, token, None) for logprob, token in zip(sampled.logprobs, ids, strict=True)
        ]
        if prompt_logprobs is not None:
            scored = [None, *prompt_logprobs]
            meta.input_token_logprobs = [
                (logprob, token, None)
                for logprob, token in zip(scored, request.input_ids, strict=True)
            ]
    return GenerateReply(output_ids=ids, meta_info=meta)


def version_spans(sampled: Sampled) -> list[WeightVersionSpan]:
    """Runs of output positions by the version that sampled them; none are empty."""
    spans = []
    start = 0
    for end, version in [*sampled.switches, (len(sampled.token_ids), sampled.version)]:
        if end > start:
            spans.append(WeightVersionSpan(version=version, start=start, end=end))
            start = end
    return spans


def _finish_reason(ids: list[int], eos_token_ids: frozenset[int]) -> dict[str, Any]:
    if ids and ids[-1] in eos_token_ids:
        return {"type": "stop", "matched": ids[-1]}
    return {"type": "length", "length": len(ids)}
