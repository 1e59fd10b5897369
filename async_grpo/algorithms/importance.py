"""Importance ratios between policies, from log-probs. Element-wise, any shape."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio only says "no overlap", and its square overflows float32."""


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """log(p / q) in float32 or better, within +-MAX_LOG_RATIO.

    Args:
        numerator_logprobs: log p, nats; gradients flow through it.
        denominator_logprobs: log q, nats, same shape.

    Returns:
        The difference; its gradient is 0 where it was clamped.
    """
    dtype = torch.promote_types(
        torch.promote_types(numerator_logprobs.dtype, denominator_logprobs.dtype), torch.float32
    )
    difference = numerator_logprobs.to(dtype) - denominator_logprobs.to(dtype)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(policy_logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """pi_theta / pi_anchor; the anchor is a constant."""
    return log_ratio(policy_logprobs, anchor_logprobs.detach()).exp()


def truncated_behavior_weight(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float
) -> Tensor:
    """min(pi_prox / pi_behavior, cap) per token, without gradient.

    Source: truncated importance sampling of arXiv:2110.00641's decoupled objective.
    """
    with torch.no_grad():
        return log_ratio(proximal_logprobs, behavior_logprobs).exp().clamp(max=cap)
