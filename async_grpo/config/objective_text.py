"""The resolved objective in words. No torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_grpo.config.algorithm import AlgorithmSection


def objective_line(section: "AlgorithmSection") -> str:
    """The resolved objective in one line."""
    parts = [
        _advantage_text(section), _surrogate_text(section), _weight_text(section),
        *_rejection_texts(section), _aggregation_text(section), _kl_text(section),
        f"- {section.entropy_coef:g} * entropy of the policy" if section.entropy_coef else "",
    ]  # fmt: skip
    return "; ".join(part for part in parts if part)


def clip_note(section: "AlgorithmSection", updates_per_step: int) -> str:
    """Why the clip does nothing, and what bounds the update then; empty if it is alive."""
    if updates_per_step > 1 or section.surrogate != "ppo" or section.anchor != "proximal":
        return ""
    if section.proximal == "interpolate":
        return ""
    bound = "there is no other bound"
    if section.behavior_weight != "none":
        bound = f"the bound is behavior_weight <= {section.behavior_weight_cap:g}"
    return f"one update per step; {bound}"


def _advantage_text(section: "AlgorithmSection") -> str:
    eps = f"{section.advantage_eps:g}"
    if section.advantage_eps_placement == "outside":
        divisor = f"(std + {eps})"
    else:
        divisor = f"sqrt(var + {eps})"
    texts = {
        "grpo": f"(R - mean) / {divisor}",
        "mean_only": "R - mean",
        "rloo": "R - mean of the others",
        "opo": "R - length-weighted mean",
        "maxrl": "(R - mean) / mean",
        "batch_std": f"(R - mean) / (std of the batch + {eps})",
        "reinforce_pp": f"R - mean, whitened over the batch (eps {eps})",
    }
    text = f"advantage {texts.get(section.advantage, f'by {section.advantage}')}"
    if section.advantage in ("grpo", "batch_std", "reinforce_pp"):
        text += f", {section.advantage_std} std"
    if section.advantage_min_std:
        text += f", 0 where std <= {section.advantage_min_std:g}"
    if section.overlong_buffer_tokens:
        limit = section.length_limit or "generation.max_new_tokens"
        text += f", overlong penalty over the last {section.overlong_buffer_tokens} of {limit}"
    return text


def _surrogate_text(section: "AlgorithmSection") -> str:
    around = f"the {section.anchor} policy"
    level = {"geometric": "geometric-mean ratio"}.get(
        section.ratio_level, f"{section.ratio_level}-level ratio"
    )
    cap = f"{section.ratio_cap:g}"
    match section.surrogate:
        case "ppo":
            low, high = 1 - section.clip_low, 1 + section.clip_high
            dual = "no dual clip"
            if section.dual_clip is not None:
                dual = f"dual clip {section.dual_clip:g}"
            return f"{level} clipped to [{low:g}, {high:g}] around {around}, {dual}"
        case "gmpo":
            clip = f"+-{section.gmpo_log_clip:g}"
            return f"gmpo: geometric mean of token ratios to {around}, log-clip {clip}"
        case "cispo":
            bounds = f"[{section.ratio_floor:g}, {cap}]"
            return f"cispo: detached {level} to {around} within {bounds}"
        case "ratio":
            bound = "" if section.ratio_cap == float("inf") else f", no gradient above {cap}"
            return f"{level} to {around} times A{bound}"
        case "sapo":
            taus = f"{section.sapo_tau_positive:g} / {section.sapo_tau_negative:g}"
            return f"sapo: sigmoid gate on the {level} to {around}, tau {taus}"
        case "reinforce":
            return "reinforce: -A log pi, no ratio"
        case "dppo":
            moves = f"-{section.dppo_delta_low:g} / +{section.dppo_delta_high:g}"
            return f"dppo: dropped where probability moved {moves} from {around}, ratio <= {cap}"
        case "topr":
            bounds = f"[{section.topr_low:g}, {section.topr_high:g}]"
            return f"topr: {level} to {around} within {bounds} where A < 0, 1 elsewhere"
        case "aspo":
            return f"aspo: {level} to {around}, flipped where A > 0, weight <= {cap}"
        case custom:
            return f"surrogate {custom} of the {level} to {around}"


def _weight_text(section: "AlgorithmSection") -> str:
    if section.behavior_weight == "none":
        return "no behavior weight"
    per = {"token": "per token", "sequence": "per sequence (product)"}
    level = per.get(section.behavior_weight_level, "per sequence (geometric mean)")
    low, cap = section.behavior_weight_floor, f"{section.behavior_weight_cap:g}"
    bounds = f"behavior_weight <= {cap}" if not low else f"behavior_weight in [{low:g}, {cap}]"
    action = "" if section.behavior_weight == "truncate" else ", 0 outside"
    source = ", proximal policy interpolated" if section.proximal == "interpolate" else ""
    return f"{bounds} {level}{action}{source}"


def _rejection_texts(section: "AlgorithmSection") -> Iterator[str]:
    for kind in ("token", "sequence"):
        low, high = getattr(section, f"reject_{kind}_low"), getattr(section, f"reject_{kind}_high")
        if low is None and high is None:
            continue
        level = "" if kind == "token" else f" {section.reject_sequence_level}"
        lowest = "0" if low is None else f"{low:g}"
        highest = "inf" if high is None else f"{high:g}"
        yield f"reject {kind}s with{level} ratio outside [{lowest}, {highest}]"
    if section.reject_veto is not None:
        yield f"veto sequences with a token ratio < {section.reject_veto:g}"
    if section.reject_opsm is not None:
        yield f"opsm: reject negative sequences drifted by > {section.reject_opsm:g} nats"
    if section.reject_m2 is not None:
        yield f"m2 <= {section.reject_m2:g} over {section.reject_m2_tokens} tokens"
    for reference in section.reject_custom:
        yield f"reject by {reference}"
    if section.overlong_mask:
        yield "reject sequences cut by length"


def _aggregation_text(section: "AlgorithmSection") -> str:
    text = f"{section.aggregation} over the global batch"
    if section.aggregation == "constant":
        text += f", length {section.length_limit or 'generation.max_new_tokens'}"
    if section.denominator == "kept":
        text += ", kept tokens only"
    return text


def _kl_text(section: "AlgorithmSection") -> str:
    if not section.kl_coef:
        return "KL off"
    corrections = {
        "none": "",
        "detached": "sg(pi / pi_behavior) * ",
        "through": "(pi / pi_behavior) * ",
    }
    ratio = corrections[section.kl_correction]
    if section.kl_correction == "detached" and section.kl_ratio_cap != float("inf"):
        ratio = f"sg(min(pi / pi_behavior, {section.kl_ratio_cap:g})) * "
    estimate = f"{ratio}{section.kl_estimator}"
    return f"+ {section.kl_coef:g} * {estimate} against the initial policy"
