"""The policy loss: one composable objective over packed tokens of whole sequences.

surrogate(ratio of a level against an anchor, A) * behavior weight + KL, without rejected tokens.
Knows nothing of micro-batches, devices or processes: the caller weighs, sums and divides once by
the global denominator (`algorithms.aggregation`). N = tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from async_grpo.algorithms.behavior_weights import (
    BehaviorWeight,
    BehaviorWeightRule,
    WeightAction,
    behavior_weight,
)
from async_grpo.algorithms.importance import RatioLevel, log_ratio
from async_grpo.algorithms.kl import KLRule, kl_penalty
from async_grpo.algorithms.sequences import Sequences
from async_grpo.algorithms.surrogates import (
    Surrogate,
    SurrogateFunction,
    SurrogateInput,
    ppo,
    unclipped,
)


class Anchor(StrEnum):
    """What the importance ratio is against."""

    proximal = "proximal"
    """the policy at the start of the step; correct for the behavior policy by a weight"""
    behavior = "behavior"
    """the policy that sampled the token: the ratio is the correction"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Trained tokens of whole sequences; every tensor [N]."""

    policy_logprobs: Tensor
    """log pi_theta, nats, requires grad"""
    proximal_logprobs: Tensor
    """With one optimizer update per batch: `policy_logprobs.detach()`; the clip is then inert."""
    behavior_logprobs: Tensor | None
    """as stored with the tokens"""
    advantages: Tensor
    sequences: Sequences
    reference_logprobs: Tensor | None = None
    truncated: Tensor | None = None
    """bool: of a sequence that was cut by its length"""
    entropy: Tensor | None = None
    """of pi_theta where the token was sampled, nats, requires grad"""

    def required(self, name: str, reason: str) -> Tensor:
        """The optional input `name`.

        Raises:
            ValueError: it is missing; a correction never silently does nothing.
        """
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"{reason} needs {name}, and the batch has none")
        return value


MaskFunction = Callable[[TokenBatch], Tensor]
"""batch -> bool [N], True where a token is rejected"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A composed objective."""

    surrogate: SurrogateFunction = field(
        default=partial(ppo, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    )
    ratio_level: RatioLevel = RatioLevel.token
    anchor: Anchor = Anchor.proximal
    weight: BehaviorWeightRule | None = None
    """None: 1"""
    rejection: Mapping[str, MaskFunction] = field(default_factory=dict)
    """name -> mask; a token is trained iff none rejects it"""
    kl: KLRule | None = None
    entropy_coef: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token losses with gradient, and detached facts about them; all [N]."""

    per_token: Tensor
    """to be minimized; 0 for rejected tokens"""
    importance_ratio: Tensor
    """pi_theta / anchor at the ratio level"""
    surrogate: Surrogate
    weight: BehaviorWeight | None
    rejected: Mapping[str, Tensor]
    """name of the mask -> bool"""
    kept: Tensor
    """bool: no mask rejects it"""
    reference_kl: Tensor | None
    """the estimate, not times its coefficient"""


@torch.no_grad()
def rejections(batch: TokenBatch, objective: Objective) -> dict[str, Tensor]:
    """What each mask of the objective rejects, a masking behavior weight included.

    Args:
        batch: policy log-probs are not used. Masks that pool tokens over the batch (m2) need all
            of it at once.
        objective: see `Objective`.
    """
    found = {name: mask(batch) for name, mask in objective.rejection.items()}
    if objective.weight is not None and objective.weight.action is WeightAction.mask:
        found["behavior_weight"] = _weight(batch, objective.weight).bounded
    return found


def policy_loss(
    batch: TokenBatch, objective: Objective, rejected: Mapping[str, Tensor] | None = None
) -> PolicyLoss:
    """The objective, token by token.

    per token: kept * (w * surrogate(r, A) + coef * kl - entropy_coef * entropy), with
    r = pi_theta / anchor, and w = pi_prox / pi_behavior, bounded and without gradient.

    Args:
        batch: whole sequences.
        objective: how the parts compose.
        rejected: what `rejections` found on the whole batch; None: found on this one.

    Raises:
        ValueError: an input that the objective needs is missing, or shapes differ.

    Source: arXiv:2110.00641 (decoupled objective), arXiv:2505.24298 (its use for stale groups);
    the parts name theirs.
    """
    _require_one_shape(batch)
    anchor = batch.proximal_logprobs
    if objective.anchor is Anchor.behavior:
        anchor = batch.required("behavior_logprobs", "a ratio against the behavior policy")
    log_r = log_ratio(
        batch.policy_logprobs, anchor.detach(),
        level=objective.ratio_level, sequences=batch.sequences,
    )  # fmt: skip
    found = objective.surrogate(
        SurrogateInput(
            batch.policy_logprobs, anchor.detach(), log_r, batch.advantages, batch.sequences
        )
    )
    surrogate = unclipped(found) if isinstance(found, Tensor) else found
    losses, weight, kl = surrogate.losses, None, None
    if objective.weight is not None:
        weight = _weight(batch, objective.weight)
        losses = weight.applied * losses
    if objective.kl is not None:
        reference = batch.required("reference_logprobs", "a KL penalty")
        kl = kl_penalty(batch.policy_logprobs, reference, batch.behavior_logprobs, objective.kl)
        losses = losses + objective.kl.coef * kl
        kl = kl.detach()
    if objective.entropy_coef:
        entropy = batch.required("entropy", "an entropy bonus")
        losses = losses - objective.entropy_coef * entropy
    if rejected is None:
        rejected = rejections(batch, objective)
    kept = torch.ones_like(losses, dtype=torch.bool)
    for mask in rejected.values():
        kept &= ~mask
    losses = torch.where(kept, losses, 0.0)
    return PolicyLoss(losses, log_r.detach().exp(), surrogate, weight, rejected, kept, kl)


def _weight(batch: TokenBatch, rule: BehaviorWeightRule) -> BehaviorWeight:
    behavior = batch.required("behavior_logprobs", "a behavior weight")
    return behavior_weight(batch.proximal_logprobs, behavior, batch.sequences, rule)


def _require_one_shape(batch: TokenBatch) -> None:
    given = {
        "policy_logprobs": batch.policy_logprobs,
        "proximal_logprobs": batch.proximal_logprobs,
        "behavior_logprobs": batch.behavior_logprobs,
        "reference_logprobs": batch.reference_logprobs,
        "advantages": batch.advantages,
        "entropy": batch.entropy,
        "sequences": batch.sequences.index,
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"the inputs of a loss must have one shape, got {shapes}")
