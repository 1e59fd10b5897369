"""Group-relative advantages from raw rewards. Knows nothing of tokens, batches or versions.

Shapes: G = rollouts of one prompt.
"""

from enum import StrEnum

from torch import Tensor


class AdvantageScale(StrEnum):
    """What the centered reward is divided by."""

    grpo = "grpo"
    mean_only = "mean_only"


def group_advantages(rewards: Tensor, *, scale: AdvantageScale, eps: float) -> Tensor:
    """Advantage of each member of a group.

    grpo: (R - mean) / (population std + eps); mean_only: R - mean. A group whose rewards are all
    equal, a group of one included, has advantages of exactly 0: float noise in the mean is never
    scaled up.

    Args:
        rewards: [..., G] floating point; pass float64, the statistics are made in its dtype.
        scale: the divisor.
        eps: added to the standard deviation, not to the variance.

    Returns:
        [..., G], same dtype, no gradient.

    Source: arXiv:2402.03300 (grpo), arXiv:2503.20783 (mean_only).
    """
    rewards = rewards.detach()
    centered = rewards - rewards.mean(-1, keepdim=True)
    if scale is AdvantageScale.grpo:
        centered = centered / (rewards.std(-1, correction=0, keepdim=True) + eps)
    tied = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    return centered.masked_fill(tied, 0.0)
