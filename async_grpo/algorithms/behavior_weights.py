"""Behavior weights: pi_prox / pi_behavior, truncated or masked; constants of the gradient."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from async_grpo.algorithms.importance import RatioLevel, log_ratio
from async_grpo.algorithms.sequences import Sequences


class WeightAction(StrEnum):
    """What happens to a weight outside its bounds."""

    truncate = "truncate"
    """it becomes the bound"""
    mask = "mask"
    """it becomes 0; the others keep their value"""


@dataclass(frozen=True, slots=True)
class BehaviorWeightRule:
    """How the weight of a token is made; both bounds are inclusive."""

    action: WeightAction
    level: RatioLevel = RatioLevel.token
    floor: float = 0.0
    cap: float = float("inf")


@dataclass(frozen=True, slots=True)
class BehaviorWeight:
    """All [N], no gradient."""

    raw: Tensor
    """before any bound: what diagnostics of the mismatch must use"""
    applied: Tensor
    """what multiplies the loss"""
    bounded: Tensor
    """bool: raw was out of bounds"""


@torch.no_grad()
def behavior_weight(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    sequences: Sequences,
    rule: BehaviorWeightRule,
) -> BehaviorWeight:
    """The weight pi_prox / pi_behavior at the rule's level, within the rule's bounds.

    A weight that is not a number stays so: it must surface in the loss.

    Source: arXiv:2110.00641 (decoupled objective); truncation per token and per sequence: Yao et
    al. 2025; masking per token: arXiv:2510.18855 (IcePop), per sequence: "MIS".
    """
    raw = log_ratio(
        proximal_logprobs, behavior_logprobs, level=rule.level, sequences=sequences
    ).exp()
    bounded = (raw < rule.floor) | (raw > rule.cap)
    if rule.action is WeightAction.truncate:
        return BehaviorWeight(raw, raw.clamp(rule.floor, rule.cap), bounded)
    return BehaviorWeight(raw, raw.masked_fill(bounded, 0.0), bounded)
