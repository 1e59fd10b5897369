"""Estimators of KL(policy || reference) from one sampled token, and the penalty made of them.

With x = log pi - log ref (http://joschu.net/blog/kl-approx.html). What an estimator's *gradient*
is, as a loss, is another matter than what its value estimates: docs/objectives.md has the table.
"""

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from async_grpo.algorithms.importance import log_ratio


def k1(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """X; unbiased, may be negative. As a loss its expected gradient on policy is 0."""
    return log_ratio(policy_logprobs, reference_logprobs)


def k2(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """X^2 / 2; biased, never negative. As a loss on policy: the gradient of KL(pi || ref)."""
    return log_ratio(policy_logprobs, reference_logprobs).square() / 2


def k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-x) - 1 + x; unbiased, never negative. As a loss on policy: that of KL(ref || pi)."""
    x = log_ratio(policy_logprobs, reference_logprobs)
    return (-x).exp() - 1 + x


class KLEstimator(StrEnum):
    """Which of the three."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KLCorrection(StrEnum):
    """How tokens of another policy are accounted for, with rho = pi / pi_behavior."""

    none = "none"
    """not at all: right on policy only"""
    detached = "detached"
    """sg(min(rho, cap)) * k"""
    through = "through"
    """rho * k, with the gradient through rho too (arXiv:2512.02556)"""


_ESTIMATORS = {KLEstimator.k1: k1, KLEstimator.k2: k2, KLEstimator.k3: k3}


@dataclass(frozen=True, slots=True)
class KLRule:
    """A penalty, added to the loss of each token."""

    coef: float
    estimator: KLEstimator = KLEstimator.k3
    correction: KLCorrection = KLCorrection.none
    ratio_cap: float = float("inf")
    """of rho; for `detached`"""


def kl_penalty(
    policy_logprobs: Tensor,
    reference_logprobs: Tensor,
    behavior_logprobs: Tensor | None,
    rule: KLRule,
) -> Tensor:
    """The estimate per token, corrected, with gradient, not yet times the coefficient.

    `detached` k2 and `through` k3 have the same gradient rho * x, that of KL(pi || ref); the
    value of the second is the unbiased KL.

    Raises:
        ValueError: a correction without behavior log-probs.
    """
    value = _ESTIMATORS[rule.estimator](policy_logprobs, reference_logprobs.detach())
    if rule.correction is KLCorrection.none:
        return value
    if behavior_logprobs is None:
        raise ValueError(f"KL correction {rule.correction} needs behavior log-probs")
    rho = log_ratio(policy_logprobs, behavior_logprobs.detach()).exp()
    if rule.correction is KLCorrection.detached:
        rho = rho.detach().clamp(max=rule.ratio_cap)
    return rho * value
