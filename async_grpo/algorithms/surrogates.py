"""Surrogates: what a token's advantage and importance ratio become before any correction.

Every surrogate is a function of one `SurrogateInput`; its numbers are keyword arguments, so that
`functools.partial` makes it a rule. A surrogate of a user has the same form and may return a
tensor [N] alone. All shapes are [N], the packed tokens of whole sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from async_grpo.algorithms.sequences import Sequences


@dataclass(frozen=True, slots=True)
class SurrogateInput:
    """What a surrogate may use."""

    policy_logprobs: Tensor
    """log pi_theta, with gradient"""
    anchor_logprobs: Tensor
    """log of the policy that the ratio is against; no gradient"""
    log_ratio: Tensor
    """of pi_theta / anchor at the ratio level, clamped, with gradient"""
    advantages: Tensor
    sequences: Sequences

    @property
    def ratio(self) -> Tensor:
        """pi_theta / anchor, with gradient."""
        return self.log_ratio.exp()


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A surrogate's losses and where its clips are active."""

    losses: Tensor
    """to be minimized, with gradient"""
    clipped_low: Tensor
    """bool: the lower bound took the gradient away"""
    clipped_high: Tensor
    """bool: the upper bound took it away, or bounds its factor"""
    clipped_dual: Tensor
    """bool: A < 0 and the dual clip took it away"""


SurrogateFunction = Callable[[SurrogateInput], "Surrogate | Tensor"]


def unclipped(losses: Tensor) -> Surrogate:
    """Losses of a surrogate without clips."""
    never = torch.zeros_like(losses, dtype=torch.bool)
    return Surrogate(losses, never, never, never)


def ppo(
    given: SurrogateInput, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Surrogate:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 at most dual_clip * |A|.

    With a geometric ratio this is GSPO: the gradient flows through the sequence's one ratio.

    Source: arXiv:1707.06347 (clip), arXiv:2503.14476 (asymmetric), arXiv:1912.09729 (dual clip),
    arXiv:2507.18071 (GSPO).
    """
    ratio, advantages = given.ratio, given.advantages
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


def gmpo(given: SurrogateInput, *, log_clip: float) -> Surrogate:
    """-A * exp(mean over the sequence of d), d the token log-ratio clipped on the side of A.

    A > 0: d at most log_clip; A < 0: d at least -log_clip. Each token of a sequence gets the
    sequence's loss. Needs a token-level ratio.

    Source: arXiv:2507.20673 (GMPO).
    """
    d, sign = given.log_ratio, given.advantages.sign()
    clipped = sign * torch.minimum(sign * d, sign * d.clamp(-log_clip, log_clip))
    mean = given.sequences.spread(given.sequences.mean(clipped))
    never = torch.zeros_like(d, dtype=torch.bool)
    return Surrogate(
        losses=-given.advantages * mean.exp(),
        clipped_low=(given.advantages < 0) & (d < -log_clip),
        clipped_high=(given.advantages > 0) & (d > log_clip),
        clipped_dual=never,
    )


def cispo(given: SurrogateInput, *, ratio_floor: float = 0.0, ratio_cap: float) -> Surrogate:
    """-sg(clip(r, ratio_floor, ratio_cap)) * A * log pi: never drops a token's gradient.

    Against the behavior policy it is also the stop-gradient form of AIPO.

    Source: arXiv:2506.13585 (CISPO), arXiv:2510.13786 (ScaleRL, cap 5), arXiv:2505.24034 (AIPO).
    """
    ratio = given.ratio.detach()
    never = torch.zeros_like(ratio, dtype=torch.bool)
    weight = ratio.clamp(ratio_floor, ratio_cap)
    return Surrogate(
        losses=-weight * given.advantages * given.policy_logprobs,
        clipped_low=ratio < ratio_floor,
        clipped_high=ratio > ratio_cap,
        clipped_dual=never,
    )


def ratio_product(given: SurrogateInput, *, ratio_cap: float = float("inf")) -> Surrogate:
    """-min(r, ratio_cap) * A with the gradient through r: none where r is above the cap.

    The differentiable form of AIPO, not equivalent to the stop-gradient form.

    Source: arXiv:2505.24034 (AIPO).
    """
    ratio = given.ratio
    above = ratio.detach() > ratio_cap
    never = torch.zeros_like(above)
    return Surrogate(-ratio.clamp(max=ratio_cap) * given.advantages, never, above, never)


def reinforce(given: SurrogateInput) -> Surrogate:
    """-A * log pi: no ratio and no anchor.

    Source: arXiv:2402.14740; arXiv:2504.02546 (GPG).
    """
    return unclipped(-given.advantages * given.policy_logprobs)


def sapo(given: SurrogateInput, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """-A * (4 / tau) * sigmoid(tau * (r - 1)): a soft gate in place of a clip.

    tau is tau_positive where A > 0, else tau_negative.

    Source: arXiv:2511.20347 (SAPO).
    """
    tau = torch.full_like(given.log_ratio, tau_negative).masked_fill(
        given.advantages > 0, tau_positive
    )
    gate = 4 / tau * torch.sigmoid(tau * (given.ratio - 1))
    return unclipped(-given.advantages * gate)


def dppo(
    given: SurrogateInput, *, delta_low: float, delta_high: float, ratio_cap: float
) -> Surrogate:
    """-sg(min(r, ratio_cap)) * A * log pi, dropped where the *probability* moved too far along A.

    A > 0: dropped if pi - anchor > delta_high; else dropped if anchor - pi > delta_low. A ratio
    test punishes rare tokens (.001 -> .002) and passes large moves (.5 -> .6); this one does not.

    Source: arXiv:2602.04879 (DPPO, binary total variation).
    """
    delta = given.policy_logprobs.detach().exp() - given.anchor_logprobs.exp()
    positive = given.advantages > 0
    high, low = positive & (delta > delta_high), ~positive & (delta < -delta_low)
    weight = given.ratio.detach().clamp(max=ratio_cap)
    losses = -weight * given.advantages * given.policy_logprobs
    never = torch.zeros_like(high)
    return Surrogate(losses.masked_fill(high | low, 0.0), low, high, never)


def topr_weight(given: SurrogateInput, *, low: float, high: float) -> Tensor:
    """1 where A >= 0, else the ratio within [low, high]; no gradient."""
    bounded = given.ratio.detach().clamp(low, high)
    return torch.where(given.advantages >= 0, torch.ones_like(bounded), bounded)


def topr(given: SurrogateInput, *, low: float = 0.0, high: float = 1.0) -> Surrogate:
    """-w * A * log pi, with w = 1 for A >= 0 and the bounded *sequence* ratio for A < 0.

    Needs a sequence-level ratio.

    Source: arXiv:2503.14286 (TOPR).
    """
    ratio, negative = given.ratio.detach(), given.advantages < 0
    weight = topr_weight(given, low=low, high=high)
    never = torch.zeros_like(negative)
    return Surrogate(
        losses=-weight * given.advantages * given.policy_logprobs,
        clipped_low=negative & (ratio < low),
        clipped_high=negative & (ratio > high),
        clipped_dual=never,
    )


def aspo(given: SurrogateInput, *, ratio_cap: float = float("inf")) -> Surrogate:
    """-A * w with the ratio flipped for A > 0: w = 1 / r there, r elsewhere; gradient -A * w.

    `ratio_cap` bounds w and leaves the gradient alive (the soft dual clip; not the paper's exact
    rule, which this form stands in for).

    Source: arXiv:2510.06062 (ASPO).
    """
    fixed = given.log_ratio.detach()
    flipped = torch.where(given.advantages > 0, -fixed, fixed).exp()
    score = (given.log_ratio - fixed).exp()  # 1, with the gradient of log pi
    never = torch.zeros_like(fixed, dtype=torch.bool)
    losses = -given.advantages * flipped.clamp(max=ratio_cap) * score
    return Surrogate(losses, never, flipped > ratio_cap, never)
