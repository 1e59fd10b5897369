"""Group-relative advantages from raw rewards. Knows nothing of tokens, batches or versions.

Rewards of one group are a tensor [..., G], floating point; pass float64, the statistics are made
in its dtype. Results have its shape and no gradient. A group whose rewards are all equal, a group
of one included, has advantages of exactly 0 by every rule but the length-weighted one of a
baseline that its members share: float noise in a mean is never scaled up.
"""

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor


class EpsPlacement(StrEnum):
    """Where eps guards the division; on nearly tied groups the two differ 20-fold."""

    outside = "outside"
    """(R - mean) / (std + eps)"""
    inside = "inside"
    """(R - mean) / sqrt(var + eps)"""


def tied(rewards: Tensor) -> Tensor:
    """[...]: whether all rewards of the group are equal."""
    return rewards.amax(-1) == rewards.amin(-1)


def mean_only(rewards: Tensor) -> Tensor:
    """R - mean. Source: arXiv:2503.20783 (Dr. GRPO)."""
    rewards = rewards.detach()
    centered = rewards - rewards.mean(-1, keepdim=True)
    return centered.masked_fill(tied(rewards)[..., None], 0.0)


def z_score(
    rewards: Tensor,
    *,
    eps: float,
    placement: EpsPlacement = EpsPlacement.outside,
    correction: int = 0,
    min_std: float = 0.0,
) -> Tensor:
    """(R - mean) / std, guarded by eps.

    Args:
        rewards: [..., G].
        eps: see `EpsPlacement`.
        placement: of eps.
        correction: 0: population std, as published; 1: sample std (torch's default; TRL, verl).
        min_std: a group whose std is not above it has advantages 0: noise is not worth a step.

    Source: arXiv:2402.03300 (GRPO).
    """
    centered = mean_only(rewards)
    if rewards.shape[-1] <= correction:  # the sample std of one reward is not a number
        return torch.zeros_like(centered)
    std = rewards.detach().std(-1, correction=correction, keepdim=True)
    scale = std + eps if placement is EpsPlacement.outside else (std.square() + eps).sqrt()
    quiet = tied(rewards)[..., None] | (std <= min_std)
    return (centered / scale).masked_fill(quiet, 0.0)


def rloo(rewards: Tensor) -> Tensor:
    """R minus the mean of the *other* members = G / (G - 1) * (R - mean).

    Source: arXiv:2402.14740 (RLOO).
    """
    size = rewards.shape[-1]
    return mean_only(rewards) * (size / (size - 1) if size > 1 else 0.0)


def opo_baseline(rewards: Tensor, lengths: Tensor) -> Tensor:
    """[..., 1]: mean of R weighted by length."""
    return (lengths * rewards).sum(-1, keepdim=True) / lengths.sum(-1, keepdim=True)


def opo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """R minus the length-weighted mean: the baseline of least variance if scores grow with length.

    Source: arXiv:2505.23585 (OPO).
    """
    rewards = rewards.detach()
    lengths = lengths.to(rewards.dtype)
    advantages = rewards - opo_baseline(rewards, lengths)
    return advantages.masked_fill(tied(rewards)[..., None], 0.0)


def maxrl(rewards: Tensor) -> Tensor:
    """(R - mean) / mean if the mean is > 0, else 0; for rewards >= 0.

    Source: prime-rl's max_rl.
    """
    mean = rewards.detach().mean(-1, keepdim=True)
    advantages = mean_only(rewards)
    return torch.where(mean > 0, advantages / mean, 0.0)


def with_members(rewards: Tensor, valid: Tensor, advantages: Tensor) -> Tensor:
    """Scatter the advantages of the valid members [K] back to all [G]; the others get 0.

    For members that have no reward at all (a scorer failed): they leave the statistics. A member
    that was scored and whose *tokens* are rejected stays in the statistics, or the baseline learns
    what the rejection prefers: mask its loss instead.
    """
    spread = torch.zeros_like(rewards)
    spread[valid] = advantages
    return spread


def batch_scaled(groups: Sequence[Tensor], *, eps: float, correction: int = 0) -> list[Tensor]:
    """(R - mean of its group) / (std of all rewards of the batch + eps).

    Source: arXiv:2508.08221 (LitePPO); TRL's scale_rewards=batch has correction 1.
    """
    rewards = torch.cat([group.detach() for group in groups])
    scale = _std(rewards, correction) + eps
    return [_divided(mean_only(group), scale) for group in groups]


def whitened(groups: Sequence[Tensor], *, eps: float, correction: int = 0) -> list[Tensor]:
    """Center by group; then c -> (c - mean c) / (std c + eps) over the batch.

    A tied group's advantages are 0, and it counts in the batch's statistics.

    Source: arXiv:2501.03262 (REINFORCE++ baseline).
    """
    centered = [mean_only(group) for group in groups]
    every = torch.cat(centered)
    scale = _std(every, correction) + eps
    return [
        _divided(values - every.mean(), scale).masked_fill(tied(group), 0.0)
        for group, values in zip(groups, centered, strict=True)
    ]


def _std(values: Tensor, correction: int) -> Tensor:
    if len(values) <= correction:
        return values.new_zeros(())
    return values.std(correction=correction)


def _divided(values: Tensor, scale: Tensor) -> Tensor:
    return values / scale if bool(scale > 0) else torch.zeros_like(values)


def overlong_penalty(num_tokens: Tensor, *, limit: int, buffer: int) -> Tensor:
    """Added to the reward: 0 up to limit - buffer, falling to -1 at `limit`, -1 beyond.

    Source: arXiv:2503.14476 (DAPO), equation 13.
    """
    over = num_tokens.double() - (limit - buffer)
    return -(over / buffer).clamp(0.0, 1.0)
