"""Section `algorithm`: the objective. What combines with what is in `config.objective`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from async_grpo.config.objective import objective_problems
from async_grpo.config.presets import PRESETS, Preset


class EpsPlacement(StrEnum):
    """Where advantage_eps is added."""

    outside = "outside"
    inside = "inside"


class Std(StrEnum):
    """Which standard deviation."""

    population = "population"
    sample = "sample"


class RatioLevel(StrEnum):
    """What one ratio is of."""

    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class Anchor(StrEnum):
    """What the importance ratio is against."""

    proximal = "proximal"
    behavior = "behavior"


class Proximal(StrEnum):
    """Where the proximal log-probs come from."""

    auto = "auto"
    recompute = "recompute"
    interpolate = "interpolate"


class Interpolation(StrEnum):
    """In which space the proximal policy is interpolated."""

    log_linear = "log_linear"
    linear = "linear"


class BehaviorWeight(StrEnum):
    """What happens to a behavior weight out of bounds."""

    none = "none"
    truncate = "truncate"
    mask = "mask"


class M2Tokens(StrEnum):
    """Tokens that the second moment is taken over."""

    trust_region = "trust_region"
    all = "all"


class Aggregation(StrEnum):
    """How per-token losses become one number; the denominator is always the global batch's."""

    token_mean = "token_mean"
    sequence_mean_token_mean = "sequence_mean_token_mean"
    sequence_mean_token_sum = "sequence_mean_token_sum"
    constant = "constant"


class Denominator(StrEnum):
    """Which tokens the denominator counts."""

    original = "original"
    kept = "kept"


class KLEstimator(StrEnum):
    """Which estimate of KL against the reference policy."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KLCorrection(StrEnum):
    """How the estimate accounts for tokens of another policy."""

    none = "none"
    detached = "detached"
    through = "through"


class ZeroVariance(StrEnum):
    """What becomes of a group whose rewards are all equal."""

    drop = "drop"
    keep = "keep"


@dataclass(kw_only=True)
class AlgorithmSection:
    """The objective: a preset, and every field of it that is set here instead."""

    preset: Preset = Preset.default
    """Sets the fields below before your own; see docs/objectives.md for what each is."""

    advantage: str = "grpo"
    """grpo: (R - mean) / std of the group; mean_only; rloo; opo (length-weighted baseline); maxrl
    ((R - mean) / mean); batch_std (group mean, std of the batch); reinforce_pp (group mean, then
    whitened over the batch); or package.module:attribute."""
    advantage_eps: float = 1e-8
    """Guards the division by the std."""
    advantage_eps_placement: EpsPlacement = EpsPlacement.outside
    """outside: std + eps; inside: sqrt(var + eps), which damps nearly tied groups."""
    advantage_std: Std = Std.population
    """population (published) or sample (torch's default; TRL, verl)."""
    advantage_min_std: float = 0.0
    """A group whose std is not above this has advantages 0."""
    zero_variance: ZeroVariance = ZeroVariance.drop
    """drop: a group whose rewards are all equal ends as no_signal; keep: it is trained, with
    advantage 0, and counts in the denominator."""
    overlong_buffer_tokens: int = 0
    """0: off; else a completion loses up to 1 of its reward over the last so many tokens before
    length_limit."""
    overlong_mask: bool = False
    """Do not train sequences that were cut by their length."""
    length_limit: int | None = None
    """Length that the overlong penalty and aggregation=constant refer to; null:
    generation.max_new_tokens."""

    surrogate: str = "ppo"
    """ppo (clip), gmpo, cispo, ratio (-min(r, cap) * A), sapo, reinforce, dppo, topr, aspo; or
    package.module:attribute."""
    ratio_level: RatioLevel = RatioLevel.token
    """Of the importance ratio: token, sequence (product), geometric (mean; ppo with it is GSPO)."""
    anchor: Anchor = Anchor.proximal
    """The importance ratio is against the policy at the start of the step, or against the behavior
    policy."""
    clip_low: float = 0.2
    """ppo: importance_ratio is bounded below by 1 - clip_low."""
    clip_high: float = 0.28
    """ppo: importance_ratio is bounded above by 1 + clip_high."""
    dual_clip: float | None = 3.0
    """ppo: for negative advantages the loss is bounded by dual_clip * |A|; must exceed
    1 + clip_high; null: off."""
    ratio_floor: float = 0.0
    """cispo: lower bound of the detached ratio."""
    ratio_cap: float = math.inf
    """cispo, ratio, dppo, aspo: upper bound of the ratio."""
    gmpo_log_clip: float = 0.4
    """gmpo: bound of the token log-ratio."""
    sapo_tau_positive: float = 1.0
    """sapo: temperature of the gate for positive advantages."""
    sapo_tau_negative: float = 1.05
    """sapo: for the others."""
    dppo_delta_low: float = 0.2
    """dppo: largest fall of a token's probability that is trained on with A <= 0."""
    dppo_delta_high: float = 0.2
    """dppo: largest rise that is trained on with A > 0."""
    topr_low: float = 0.0
    """topr: lower bound of the weight for negative advantages."""
    topr_high: float = 1.0
    """topr: upper bound of it."""

    proximal: Proximal = Proximal.auto
    """auto: the policy itself with one update per step, a forward pass before the updates
    otherwise; recompute: always the pass; interpolate: between behavior and policy by version
    (A-3PO), without a pass."""
    proximal_interpolation: Interpolation = Interpolation.log_linear
    """interpolate: of log-probs or (linear) of probabilities."""
    behavior_weight: BehaviorWeight = BehaviorWeight.truncate
    """pi_prox / pi_behavior: none (1), truncate (to its bounds), mask (0 outside its bounds)."""
    behavior_weight_level: RatioLevel = RatioLevel.token
    """token, sequence (product) or geometric (mean)."""
    behavior_weight_floor: float = 0.0
    """Its lower bound."""
    behavior_weight_cap: float = 2.0
    """Its upper bound."""

    reject_token_low: float | None = None
    """Reject tokens with pi_prox / pi_behavior below this."""
    reject_token_high: float | None = None
    """Reject tokens with pi_prox / pi_behavior above this."""
    reject_sequence_low: float | None = None
    """Reject sequences whose ratio is below this."""
    reject_sequence_high: float | None = None
    """Reject sequences whose ratio is above this."""
    reject_sequence_level: RatioLevel = RatioLevel.geometric
    """Ratio of a sequence: geometric (mean) or sequence (product)."""
    reject_veto: float | None = None
    """Reject a sequence if the ratio of any of its tokens is below this (1e-4 to 1e-6)."""
    reject_opsm: float | None = None
    """Reject a sequence of negative advantage if its mean log(pi_behavior / pi_prox) is above."""
    reject_m2: float | None = None
    """Reject tokens of the largest squared log-ratio until the mean of the others is this."""
    reject_m2_tokens: M2Tokens = M2Tokens.trust_region
    """trust_region: tokens that moved along their advantage; or all."""
    reject_custom: list[str] = field(default_factory=list)
    """Masks of your own, each package.module:attribute."""

    aggregation: Aggregation = Aggregation.token_mean
    """token_mean over the global batch, sequence_mean_token_mean, sequence_mean_token_sum, or
    constant (sum / (sequences * length_limit))."""
    denominator: Denominator = Denominator.original
    """original: rejected tokens count in the denominator; kept: they do not."""
    kl_coef: float = 0.0
    """Weight of KL against the frozen initial policy, in the loss; 0: no reference model."""
    kl_estimator: KLEstimator = KLEstimator.k3
    """k1, k2 or k3."""
    kl_correction: KLCorrection = KLCorrection.none
    """none: on policy only; detached: times pi / pi_behavior as a constant; through: with its
    gradient."""
    kl_ratio_cap: float = math.inf
    """detached: upper bound of that ratio."""
    entropy_coef: float = 0.0
    """Bonus for the entropy of the policy at each trained token, at the sampling temperature; a
    rejected token has none."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from objective_problems(self, where)


def preset_section(name: str, **fields: Any) -> AlgorithmSection:
    """The section that preset `name` with `fields` of one's own resolves to."""
    preset = Preset(name)
    values: Mapping[str, Any] = {**PRESETS[preset], **fields}
    types: dict[str, Any] = {
        "advantage_eps_placement": EpsPlacement, "advantage_std": Std, "ratio_level": RatioLevel,
        "anchor": Anchor, "proximal": Proximal, "proximal_interpolation": Interpolation,
        "behavior_weight": BehaviorWeight, "behavior_weight_level": RatioLevel,
        "reject_sequence_level": RatioLevel, "reject_m2_tokens": M2Tokens,
        "aggregation": Aggregation, "denominator": Denominator, "kl_estimator": KLEstimator,
        "kl_correction": KLCorrection, "zero_variance": ZeroVariance,
    }  # fmt: skip
    typed = {name: types.get(name, lambda value: value)(value) for name, value in values.items()}
    return AlgorithmSection(preset=preset, **typed)
