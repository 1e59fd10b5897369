"""The proximal policy without a forward pass of its own: interpolated between two others.

All element-wise. The result is a constant: letting the gradient flow through the interpolated
anchor would undo the clip.
"""

from enum import StrEnum

import torch
from torch import Tensor


class Interpolation(StrEnum):
    """In which space."""

    log_linear = "log_linear"
    """of log-probs: the ratio splits into rho^(1 - alpha), clipped, and rho^alpha, the weight"""
    linear = "linear"
    """of probabilities"""


def interpolation_weight(versions: Tensor, *, policy_version: int, proximal_version: int) -> Tensor:
    """(v_prox - v) / (v_theta - v) within [0, 1]; 0 for tokens as new as the policy.

    Args:
        versions: [N] int64, policy version that sampled each token.
        policy_version: v_theta.
        proximal_version: v_prox; A-3PO takes v_theta - 1.

    Returns:
        [N] float64. 0 also where no policy sampled the token (version < 0).

    Source: arXiv:2512.06547 (A-3PO).
    """
    behind = policy_version - versions.double()
    alpha = (proximal_version - versions.double()) / behind.clamp(min=1.0)
    return torch.where((behind > 0) & (versions >= 0), alpha.clamp(0.0, 1.0), 0.0)


@torch.no_grad()
def interpolated_proximal(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    alpha: Tensor,
    how: Interpolation = Interpolation.log_linear,
) -> Tensor:
    """Log-probs of a policy `alpha` of the way from behavior to policy; no gradient.

    Source: arXiv:2512.06547 (A-3PO).
    """
    alpha = alpha.to(policy_logprobs.dtype)
    if how is Interpolation.log_linear:
        return behavior_logprobs + alpha * (policy_logprobs - behavior_logprobs)
    return ((1 - alpha) * behavior_logprobs.exp() + alpha * policy_logprobs.exp()).log()
