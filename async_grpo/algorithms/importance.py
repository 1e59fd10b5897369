"""Importance ratios between policies, from log-probs of sampled tokens; in log space throughout."""

from enum import StrEnum

import torch
from torch import Tensor

from async_grpo.algorithms.sequences import Sequences

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio only says "no overlap", and its square overflows float32."""


class RatioLevel(StrEnum):
    """What one ratio is of."""

    token = "token"
    """each token by itself"""
    sequence = "sequence"
    """the product over the sequence, the same for all its tokens: unbiased, explodes with length"""
    geometric = "geometric"
    """the geometric mean over the sequence: free of length, no importance weight any more"""


def log_difference(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """log(p / q) per token, in float32 or better, not clamped."""
    dtype = torch.promote_types(
        torch.promote_types(numerator_logprobs.dtype, denominator_logprobs.dtype), torch.float32
    )
    return numerator_logprobs.to(dtype) - denominator_logprobs.to(dtype)


def log_ratio(
    numerator_logprobs: Tensor,
    denominator_logprobs: Tensor,
    *,
    level: RatioLevel = RatioLevel.token,
    sequences: Sequences | None = None,
) -> Tensor:
    """log(p / q) in float32 or better, within +-MAX_LOG_RATIO.

    Args:
        numerator_logprobs: [N] log p, nats; gradients flow through it.
        denominator_logprobs: [N] log q, nats.
        level: a sequence's value is reduced first, clamped then, and given to all its tokens.
        sequences: needed for every level but token, which takes any shape without it.

    Returns:
        [N]; its gradient is 0 where it was clamped.

    Raises:
        ValueError: a level above the token without `sequences`.
    """
    difference = log_difference(numerator_logprobs, denominator_logprobs)
    if level is not RatioLevel.token:
        if sequences is None:
            raise ValueError(f"a ratio of level {level} needs to know the sequences")
        reduce = sequences.sum if level is RatioLevel.sequence else sequences.mean
        difference = sequences.spread(reduce(difference))
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def prefix_log_ratio(
    numerator_logprobs: Tensor, denominator_logprobs: Tensor, sequences: Sequences
) -> Tensor:
    """Log of the product of the token ratios up to each token, itself included; [N].

    The exact weight of a token's score, given its prefix. Motivated by arXiv:2601.22718 (MinPRO).
    """
    return sequences.prefix_sum(log_difference(numerator_logprobs, denominator_logprobs))


def importance_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """P / q per token; gradients flow through p, q is a constant."""
    return log_ratio(numerator_logprobs, denominator_logprobs.detach()).exp()
