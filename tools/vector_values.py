"""Vectors of advantages, masks, weights, KL values and diagnostics. Part of check_vectors.py."""

from collections.abc import Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from vector_losses import Packed, Values

from async_grpo.algorithms import advantages, diagnostics, kl, proximal, rejection
from async_grpo.algorithms.advantages import EpsPlacement
from async_grpo.algorithms.importance import (
    RatioLevel,
    importance_ratio,
    log_ratio,
    prefix_log_ratio,
)
from async_grpo.algorithms.staleness import histogram, sequence_staleness

Inputs = Mapping[str, Any]
Config = Mapping[str, Any]


def _double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _z(inputs: Inputs, config: Config, placement: EpsPlacement, eps: str = "eps") -> list[float]:
    found: list[float] = advantages.z_score(
        _double(inputs["rewards"]), eps=config[eps], placement=placement,
        correction=config["ddof"],
    ).tolist()  # fmt: skip
    return found


def z_score(inputs: Inputs, config: Config) -> Values:
    """Both placements, by the name that the vector uses; a success rate's closed form beside."""
    outside = _z(inputs, config, EpsPlacement.outside)
    inside = _z(inputs, config, EpsPlacement.inside)
    form = config.get("form", "")
    values: Values = {"outside": outside, "inside": inside}
    values["adv"] = inside if "sqrt(var" in form else outside
    winners = [value for value in outside if value > 0]
    losers = [value for value in outside if value < 0]
    values["closed"] = [winners[0], losers[0]] if winners and losers else []
    return values


def sample_std(inputs: Inputs, config: Config) -> Values:
    """TRL's and verl's eps, each with the sample std."""
    return {
        name: _z(inputs, config, EpsPlacement.outside, f"eps_{name}") for name in ("trl", "verl")
    }


def rewards_only(rule: Any) -> Any:
    """A rule of rewards alone."""
    return lambda inputs, config: {"adv": rule(_double(inputs["rewards"])).tolist()}


def opo(inputs: Inputs, config: Config) -> Values:
    """Length-weighted baseline."""
    rewards, lengths = _double(inputs["rewards"]), _double(inputs["lengths"])
    return {
        "baseline": float(advantages.opo_baseline(rewards, lengths)),
        "adv": advantages.opo(rewards, lengths).tolist(),
    }


def over_batch(rule: Any) -> Any:
    """A rule over all groups; members of a group are neighbors."""

    def compute(inputs: Inputs, config: Config) -> Values:
        pairs = zip(inputs["group"], inputs["rewards"], strict=True)
        groups = [
            _double([reward for _, reward in members])
            for _, members in groupby(pairs, key=lambda pair: pair[0])
        ]
        found = rule(groups, eps=config["eps"], correction=config["ddof"])
        return {"adv": torch.cat(list(found)).tolist()}

    return compute


def member_rejected(inputs: Inputs, config: Config) -> Values:
    """Statistics over all members with the loss masked; and over the members that are left."""
    rewards, keep = _double(inputs["rewards"]), torch.tensor(inputs["keep"])
    rule = partial(advantages.z_score, eps=config["eps"], correction=config["ddof"])
    return {
        "stats_before_reject": rule(rewards).masked_fill(~keep, 0.0).tolist(),
        "stats_after_reject": advantages.with_members(rewards, keep, rule(rewards[keep])).tolist(),
    }


def overlong(inputs: Inputs, config: Config) -> Values:
    """DAPO's penalty."""
    lengths = torch.tensor(inputs["lengths"])
    found = advantages.overlong_penalty(lengths, limit=config["L_max"], buffer=config["L_cache"])
    return {"penalty": found.tolist()}


def dynamic_sampling(inputs: Inputs, config: Config) -> Values:
    """Which groups have a signal."""
    tied = advantages.tied(_double(inputs["rewards"]))
    return {"keep": (~tied).tolist(), "zero_std_fraction": float(tied.double().mean())}


def veto(inputs: Inputs, config: Config) -> Values:
    """Smallest ratio of each sequence, and whether it is vetoed."""
    packed = Packed(inputs)
    prox, behavior, threshold = packed("prox"), packed("behav"), config["veto_threshold"]
    mask = rejection.veto(prox, behavior, packed.sequences, threshold=threshold)
    smallest = packed.sequences.min(importance_ratio(prox, behavior))
    return {
        "min_ratio": smallest.tolist(),
        "veto_seq": diagnostics.one_per_sequence(mask, packed.sequences).tolist(),
    }


def opsm(inputs: Inputs, config: Config) -> Values:
    """DeepSeek-V3.2's sequence mask."""
    packed = Packed(inputs)
    policy, behavior, sequences = packed("logp"), packed("behav"), packed.sequences
    mask = rejection.opsm(policy, behavior, packed("adv"), sequences, delta=config["delta"])
    drift = log_ratio(behavior, policy, level=RatioLevel.geometric, sequences=sequences)
    return {
        "mean_log_ratio": diagnostics.one_per_sequence(drift, sequences).tolist(),
        "keep_seq": (~diagnostics.one_per_sequence(mask, sequences)).tolist(),
    }


def a3po(inputs: Inputs, config: Config) -> Values:
    """Interpolation weight and both interpolations."""
    packed = Packed(inputs)
    alpha = proximal.interpolation_weight(
        packed("versions"), policy_version=config["v_theta"], proximal_version=config["v_prox"]
    )
    made = {
        name: packed.padded(
            proximal.interpolated_proximal(packed("logp"), packed("behav"), alpha, how)
        )
        for name, how in (
            ("loglinear", proximal.Interpolation.log_linear),
            ("linear", proximal.Interpolation.linear),
        )
    }
    return {"alpha": packed.padded(alpha), **made}


def a3po_identity(inputs: Inputs, config: Config) -> Values:
    """The log-linear proximal policy splits the ratio in two."""
    packed = Packed(inputs)
    policy, behavior = packed("logp"), packed("behav")
    middle = proximal.interpolated_proximal(policy, behavior, packed("alpha"))
    return {
        "ratio_theta_prox": packed.padded(importance_ratio(policy, middle)),
        "w_prox_behav": packed.padded(importance_ratio(middle, behavior)),
    }


def prefix_ratio(inputs: Inputs, config: Config) -> Values:
    """Ratios of prefixes, of whole sequences, and their geometric means."""
    packed = Packed(inputs)
    policy, behavior, sequences = packed("logp"), packed("behav"), packed.sequences
    values: Values = {
        "prefix_product": packed.padded(prefix_log_ratio(policy, behavior, sequences).exp())
    }
    for name, level in (("seq_product", RatioLevel.sequence), ("geo", RatioLevel.geometric)):
        ratio = log_ratio(policy, behavior, level=level, sequences=sequences).exp()
        values[name] = diagnostics.one_per_sequence(ratio, sequences).tolist()
    return values


def kl_values(inputs: Inputs, config: Config) -> Values:
    """The three estimators and their derivatives."""
    if config.get("clamp") is not None:
        raise ValueError("KL values are clamped by their log-ratio alone")
    packed, values = Packed(inputs), {}
    for name, estimator in (("k1", kl.k1), ("k2", kl.k2), ("k3", kl.k3)):
        policy = packed("logp").requires_grad_()
        value = estimator(policy, packed("ref"))
        (gradient,) = torch.autograd.grad(value.sum(), policy)
        values[name], values[f"d{name}"] = packed.padded(value), packed.padded(gradient)
    return values


def kl_through(inputs: Inputs, config: Config) -> Values:
    """Rho * k3 with the gradient through rho."""
    packed = Packed(inputs)
    policy = packed("logp").requires_grad_()
    rule = kl.KLRule(1.0, kl.KLEstimator.k3, kl.KLCorrection.through)
    value = kl.kl_penalty(policy, packed("ref"), packed("old"), rule)
    (gradient,) = torch.autograd.grad(value.sum(), policy)
    return {"value": packed.padded(value), "grad": packed.padded(gradient)}


def off_policy(inputs: Inputs, config: Config) -> Values:
    """Every statistic of behavior against proximal policy."""
    packed = Packed(inputs)
    behavior, prox, sequences = packed("behav"), packed("prox"), packed.sequences
    gap = diagnostics.divergence(behavior, prox)
    ratios = diagnostics.ratio_statistics(prox, behavior)
    whole = diagnostics.sequence_divergence(behavior, prox, sequences)
    spread = diagnostics.perplexity(behavior, prox, sequences)
    return {
        "k1_behav_prox": gap["k1"],
        "k3": gap["k3"],
        **{f"{name}_ratio": ratios[name] for name in ("mean", "max", "min")},
        "ess_token": gap["ess"] * behavior.numel(),
        "ess_token_frac": gap["ess"],
        "ess_seq": whole["ess"] * sequences.count,
        "ess_seq_frac": whole["ess"],
        "chi2_token": gap["chi2"],
        "chi2_seq": whole["chi2"],
        "ppl_train": spread["other"],
        "ppl_rollout": spread["sampling"],
        "log_ppl_diff": spread["log_gap"],
        "log_ppl_abs_diff": spread["log_abs_gap"],
        "ppl_ratio": spread["ratio"],
        "m2": gap["m2"],
    }


def ess(inputs: Inputs, config: Config) -> Values:
    """ESS, and the same from the coefficient of variation."""
    weights = _double(inputs["w"])
    cv = weights.std(correction=0) / weights.mean()
    return {
        "ess_frac": diagnostics.effective_sample_size(weights),
        "one_over_1_plus_cv2": float(1 / (1 + cv.square())),
    }


def staleness(inputs: Inputs, config: Config) -> Values:
    """Histogram, mean and ends of each sequence."""
    version = config["trainer_version"]
    rows = [
        [token for token, kept in zip(tokens, mask, strict=True) if kept]
        for tokens, mask in zip(inputs["versions"], inputs["mask"], strict=True)
    ]
    counts = histogram(version, [token for row in rows for token in row])
    ends = [sequence_staleness(version, row) for row in rows]
    total = sum(counts.values())
    return {
        "hist": {str(lag): count for lag, count in counts.items()},
        "mean": sum(lag * count for lag, count in counts.items()) / total,
        "max": max(counts),
        "head_lag_per_seq": [end.head for end in ends],
        "tail_lag_per_seq": [end.tail for end in ends],
        "version_span_per_seq": [end.version_span for end in ends],
    }


COMPUTE: dict[str, Any] = {
    "adv_grpo_popstd_eps_outside": z_score,
    "adv_grpo_popstd_eps_inside": z_score,
    "adv_grpo_tiny_variance_two_forms": z_score,
    "adv_grpo_zero_variance_all_zero": z_score,
    "adv_grpo_zero_variance_all_one": z_score,
    "adv_grpo_binary_1_of_8": z_score,
    "adv_grpo_sample_std_trl_verl": sample_std,
    "adv_dr_grpo": rewards_only(advantages.mean_only),
    "adv_rloo": rewards_only(advantages.rloo),
    "adv_maxrl": rewards_only(advantages.maxrl),
    "adv_opo_length_weighted": opo,
    "adv_lite_ppo_group_mean_batch_std": over_batch(advantages.batch_scaled),
    "adv_reinforce_pp_baseline": over_batch(advantages.whitened),
    "adv_group_member_rejected_policy": member_rejected,
    "reward_dapo_soft_overlong": overlong,
    "dapo_dynamic_sampling_keep": dynamic_sampling,
    "veto_token_1e4": veto,
    "mask_opsm_deepseek_v32": opsm,
    "prox_a3po": a3po,
    "prox_a3po_identity": a3po_identity,
    "prefix_ratio": prefix_ratio,
    "kl_values_per_token": kl_values,
    "kl_deepseek_v32_unbiased": kl_through,
    "diagnostics_rollout_vs_prox": off_policy,
    "ess_identity": ess,
    "lag_histogram_per_token_versions": staleness,
}
