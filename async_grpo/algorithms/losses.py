"""The policy loss: ratio x surrogate x anchor x behavior weight, per token.

Element-wise over any shape; knows nothing of batches, masks, devices or processes. The caller
weighs, sums and divides once by the global denominator (`algorithms.aggregation`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from async_grpo.algorithms.importance import importance_ratio, truncated_behavior_weight
from async_grpo.algorithms.kl import k3


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A clipped surrogate and where its clips are active (strictly the larger, or dual, loss)."""

    losses: Tensor
    clipped_low: Tensor
    """bool: A < 0 and ratio < 1 - clip_low"""
    clipped_high: Tensor
    """bool: A > 0 and ratio > 1 + clip_high"""
    clipped_dual: Tensor
    """bool: A < 0 and ratio > dual_clip"""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token losses with gradient, and detached facts about them; all of one shape."""

    per_token: Tensor
    """to be minimized; gradient with respect to policy_logprobs"""
    importance_ratio: Tensor
    """pi_theta / pi_prox"""
    behavior_weight: Tensor | None
    """truncated pi_prox / pi_behavior; None without a cap"""
    surrogate: Surrogate
    reference_kl: Tensor | None
    """k3 against the reference policy"""


def ppo_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 at most dual_clip * |A|.

    Args:
        ratio: importance ratio with gradient.
        advantages: same shape, no gradient.
        clip_low: lower bound is 1 - clip_low.
        clip_high: upper bound is 1 + clip_high.
        dual_clip: None: no dual clip.

    Source: arXiv:1707.06347 (clip), arXiv:2503.14476 (asymmetric), arXiv:1912.09729 (dual clip).
    """
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses = torch.maximum(plain, clipped)
    negative, fixed = advantages < 0, ratio.detach()
    clipped_dual = torch.zeros_like(negative)
    if dual_clip is not None:
        clipped_dual = negative & (fixed > dual_clip)
        losses = torch.where(negative, torch.minimum(losses, -dual_clip * advantages), losses)
    return Surrogate(
        losses=losses,
        clipped_low=negative & (fixed < 1 - clip_low),
        clipped_high=(advantages > 0) & (fixed > 1 + clip_high),
        clipped_dual=clipped_dual,
    )


def policy_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    reference_logprobs: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    behavior_weight_cap: float | None,
    kl_coef: float = 0.0,
) -> PolicyLoss:
    """Clip around the proximal policy; correct for the behavior policy by a truncated weight.

    per token: w * surrogate(r, A) + kl_coef * k3, with r = pi_theta / pi_prox and
    w = min(pi_prox / pi_behavior, cap), detached. With one optimizer update per batch pass
    `policy_logprobs.detach()` as the proximal policy: the clip is then inert and this is
    REINFORCE with token-level truncated importance sampling.

    Args:
        policy_logprobs: log pi_theta of the sampled tokens, nats, requires grad.
        proximal_logprobs: the clip anchor, no gradient taken.
        behavior_logprobs: as stored with the tokens, no gradient taken.
        advantages: same shape.
        reference_logprobs: needed if kl_coef > 0.
        clip_low: see `ppo_surrogate`.
        clip_high: see `ppo_surrogate`.
        dual_clip: see `ppo_surrogate`.
        behavior_weight_cap: upper truncation of w; None: w = 1.
        kl_coef: weight of the k3 estimate, with its gradient, inside the loss.

    Raises:
        ValueError: kl_coef > 0 without reference_logprobs, or shapes differ.

    Source: arXiv:2110.00641 (decoupled objective), arXiv:2505.24298 (its use for stale groups),
    arXiv:2402.03300 (k3 inside the loss).
    """
    shapes = {tuple(t.shape) for t in (policy_logprobs, proximal_logprobs, behavior_logprobs)}
    if shapes != {tuple(advantages.shape)}:
        raise ValueError(f"shapes differ: log-probs {shapes}, advantages {advantages.shape}")
    ratio = importance_ratio(policy_logprobs, proximal_logprobs)
    surrogate = ppo_surrogate(
        ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    losses, weight, reference_kl = surrogate.losses, None, None
    if behavior_weight_cap is not None:
        weight = truncated_behavior_weight(
            proximal_logprobs, behavior_logprobs, cap=behavior_weight_cap
        )
        losses = weight * losses
    if kl_coef > 0:
        if reference_logprobs is None:
            raise ValueError("kl_coef > 0 needs reference_logprobs")
        reference_kl = k3(policy_logprobs, reference_logprobs.detach())
        losses = losses + kl_coef * reference_kl
        reference_kl = reference_kl.detach()
    return PolicyLoss(losses, ratio.detach(), weight, surrogate, reference_kl)
