"""Section `algorithm` -> the objective and the advantage rule as functions.

The one place where names in the configuration become functions of `algorithms`; knows nothing of
batches or models.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from async_grpo.algorithms import advantages, rejection, surrogates
from async_grpo.algorithms.behavior_weights import BehaviorWeightRule, WeightAction
from async_grpo.algorithms.importance import RatioLevel
from async_grpo.algorithms.kl import KLCorrection, KLEstimator, KLRule
from async_grpo.algorithms.losses import Anchor, MaskFunction, Objective, TokenBatch
from async_grpo.config.algorithm import AlgorithmSection, BehaviorWeight, Std
from async_grpo.config.load import resolve_object
from async_grpo.errors import ConfigError, NumericsError
from async_grpo.types import RolloutGroup

AdvantageFunction = Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]]
"""(rewards of each group, completion lengths of each group) -> advantages of each group"""


def make_objective(section: AlgorithmSection) -> Objective:
    """The composed objective.

    Raises:
        ConfigError: an attribute of the user's cannot be resolved.
    """
    weight = kl = None
    if section.behavior_weight is not BehaviorWeight.none:
        weight = BehaviorWeightRule(
            action=WeightAction(section.behavior_weight.value),
            level=RatioLevel(section.behavior_weight_level.value),
            floor=section.behavior_weight_floor,
            cap=section.behavior_weight_cap,
        )
    if section.kl_coef > 0:
        kl = KLRule(
            coef=section.kl_coef,
            estimator=KLEstimator(section.kl_estimator.value),
            correction=KLCorrection(section.kl_correction.value),
            ratio_cap=section.kl_ratio_cap,
        )
    return Objective(
        surrogate=_surrogate(section),
        ratio_level=RatioLevel(section.ratio_level.value),
        anchor=Anchor(section.anchor.value),
        weight=weight,
        rejection=_masks(section),
        kl=kl,
        entropy_coef=section.entropy_coef,
    )


def _surrogate(section: AlgorithmSection) -> surrogates.SurrogateFunction:
    cap = section.ratio_cap
    match section.surrogate:
        case "ppo":
            return partial(
                surrogates.ppo,
                clip_low=section.clip_low,
                clip_high=section.clip_high,
                dual_clip=section.dual_clip,
            )
        case "gmpo":
            return partial(surrogates.gmpo, log_clip=section.gmpo_log_clip)
        case "cispo":
            return partial(surrogates.cispo, ratio_floor=section.ratio_floor, ratio_cap=cap)
        case "ratio":
            return partial(surrogates.ratio_product, ratio_cap=cap)
        case "sapo":
            return partial(
                surrogates.sapo,
                tau_positive=section.sapo_tau_positive,
                tau_negative=section.sapo_tau_negative,
            )
        case "reinforce":
            return surrogates.reinforce
        case "dppo":
            return partial(
                surrogates.dppo,
                delta_low=section.dppo_delta_low,
                delta_high=section.dppo_delta_high,
                ratio_cap=cap,
            )
        case "topr":
            return partial(surrogates.topr, low=section.topr_low, high=section.topr_high)
        case "aspo":
            return partial(surrogates.aspo, ratio_cap=cap)
        case reference:
            custom: surrogates.SurrogateFunction = _function(reference, "algorithm.surrogate")
            return custom


def _masks(section: AlgorithmSection) -> dict[str, MaskFunction]:
    masks: dict[str, MaskFunction] = {}

    def behavior(batch: TokenBatch, name: str) -> Tensor:
        return batch.required("behavior_logprobs", f"algorithm.{name}")

    def add_bounds(name: str, level: RatioLevel, low: float | None, high: float | None) -> None:
        if low is not None or high is not None:
            masks[name] = lambda batch: rejection.outside(
                batch.proximal_logprobs, behavior(batch, "reject_*"), batch.sequences,
                level=level, low=low, high=high,
            )  # fmt: skip

    add_bounds(
        "token_bounds", RatioLevel.token, section.reject_token_low, section.reject_token_high
    )
    sequence_level = RatioLevel(section.reject_sequence_level.value)
    add_bounds(
        "sequence_bounds", sequence_level, section.reject_sequence_low, section.reject_sequence_high
    )
    if (threshold := section.reject_veto) is not None:
        masks["veto"] = lambda batch: rejection.veto(
            batch.proximal_logprobs, behavior(batch, "reject_veto"), batch.sequences,
            threshold=threshold,
        )  # fmt: skip
    if (delta := section.reject_opsm) is not None:
        masks["opsm"] = lambda batch: rejection.opsm(
            batch.proximal_logprobs, behavior(batch, "reject_opsm"), batch.advantages,
            batch.sequences, delta=delta,
        )  # fmt: skip
    if (tau := section.reject_m2) is not None:
        pool = rejection.M2Tokens(section.reject_m2_tokens.value)
        masks["m2"] = lambda batch: rejection.m2(
            batch.proximal_logprobs, behavior(batch, "reject_m2"), batch.advantages,
            threshold=tau, tokens=pool,
        )  # fmt: skip
    customs = [_function(name, "algorithm.reject_custom") for name in section.reject_custom]
    if customs:
        masks["custom"] = lambda batch: torch.stack([mask(batch) for mask in customs]).any(0)
    if section.overlong_mask:
        masks["overlong"] = lambda batch: batch.required("truncated", "algorithm.overlong_mask")
    return masks


def _function(reference: str, field_name: str) -> Any:
    found = resolve_object(reference, field_name)
    if not callable(found):
        raise ConfigError(f"{field_name}: {reference} is a {type(found).__name__}, not a function")
    return found


def make_advantage(section: AlgorithmSection) -> AdvantageFunction:
    """The advantage rule over all groups of a train step.

    Raises:
        ConfigError: an attribute of the user's cannot be resolved.
    """
    correction = 0 if section.advantage_std is Std.population else 1
    eps = section.advantage_eps
    match section.advantage:
        case "grpo":
            return _per_group(
                partial(
                    advantages.z_score,
                    eps=eps,
                    placement=advantages.EpsPlacement(section.advantage_eps_placement.value),
                    correction=correction,
                    min_std=section.advantage_min_std,
                )
            )
        case "mean_only":
            return _per_group(advantages.mean_only)
        case "rloo":
            return _per_group(advantages.rloo)
        case "maxrl":
            return _per_group(advantages.maxrl)
        case "opo":
            return lambda rewards, lengths: [
                advantages.opo(*pair) for pair in zip(rewards, lengths, strict=True)
            ]
        case "batch_std":
            return lambda rewards, _: advantages.batch_scaled(
                rewards, eps=eps, correction=correction
            )
        case "reinforce_pp":
            return lambda rewards, _: advantages.whitened(rewards, eps=eps, correction=correction)
        case reference:
            custom: AdvantageFunction = _function(reference, "algorithm.advantage")
            return custom


def _per_group(rule: Callable[[Tensor], Tensor]) -> AdvantageFunction:
    return lambda rewards, _: [rule(group) for group in rewards]


def group_advantages(
    section: AlgorithmSection, rule: AdvantageFunction, groups: Sequence[RolloutGroup]
) -> list[list[float]]:
    """Advantages of every rollout of every group, from raw rewards, in float64.

    Raises:
        NumericsError: a reward, or an advantage made of finite rewards, is not finite.
        ValueError: the rule is a user's and returned another number of advantages.
    """
    rewards = [
        torch.tensor([rollout.reward for rollout in group.rollouts], dtype=torch.float64)
        for group in groups
    ]
    lengths = [
        torch.tensor([rollout.num_tokens for rollout in group.rollouts], dtype=torch.int64)
        for group in groups
    ]
    _require_finite("reward", rewards, groups)
    if section.overlong_buffer_tokens:
        rewards = [
            values + _overlong(section, counts)
            for values, counts in zip(rewards, lengths, strict=True)
        ]
    found = list(rule(rewards, lengths))
    if [tuple(values.shape) for values in found] != [tuple(values.shape) for values in rewards]:
        raise ValueError(f"algorithm.advantage={section.advantage} must return one per rollout")
    _require_finite("advantage", found, groups)
    return [values.tolist() for values in found]


def _overlong(section: AlgorithmSection, counts: Tensor) -> Tensor:
    if section.length_limit is None:
        raise ValueError("algorithm.overlong_buffer_tokens needs algorithm.length_limit")
    return advantages.overlong_penalty(
        counts, limit=section.length_limit, buffer=section.overlong_buffer_tokens
    )


def _require_finite(what: str, values: Sequence[Tensor], groups: Sequence[RolloutGroup]) -> None:
    for group, numbers in zip(groups, values, strict=True):
        if not numbers.isfinite().all():
            raise NumericsError(
                f"{what}s of group {group.group_id}/{group.attempt} are not finite: "
                f"{numbers.tolist()}"
            )
