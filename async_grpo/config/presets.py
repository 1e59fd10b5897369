"""Named objectives: what each sets in section `algorithm` before the user's own fields. Data only.

Fields that a preset does not name keep the schema's defaults, which are preset `default`.
docs/objectives.md tells when to use each and what to watch.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Preset(StrEnum):
    """Names of the presets."""

    default = "default"
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    dapo = "dapo"
    gspo = "gspo"
    gmpo = "gmpo"
    cispo = "cispo"
    sapo = "sapo"
    gpg = "gpg"
    rloo = "rloo"
    opo = "opo"
    maxrl = "maxrl"
    lite_ppo = "lite_ppo"
    reinforce_pp = "reinforce_pp"
    decoupled_ppo = "decoupled_ppo"
    a3po = "a3po"
    icepop = "icepop"
    mis = "mis"
    geo_rs = "geo_rs"
    aipo = "aipo"
    aipo_differentiable = "aipo_differentiable"
    prime_rl = "prime_rl"
    dppo = "dppo"
    topr = "topr"
    aspo = "aspo"
    m2po = "m2po"
    opsm = "opsm"
    uncorrected = "uncorrected"


_AT_BEHAVIOR: dict[str, Any] = {"anchor": "behavior", "behavior_weight": "none"}
_PPO_02: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
_SCORE: dict[str, Any] = {"surrogate": "reinforce", "behavior_weight": "none"}

PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    Preset.default: {},
    # arXiv:2402.03300, exactly: z-score with population std, clip +-0.2, k3 inside the loss
    Preset.grpo: {
        **_AT_BEHAVIOR, **_PPO_02, "aggregation": "sequence_mean_token_mean",
        "kl_coef": 0.04, "kl_estimator": "k3",
    },
    # arXiv:2503.20783
    Preset.dr_grpo: {
        **_AT_BEHAVIOR, **_PPO_02, "advantage": "mean_only", "aggregation": "constant",
    },
    # arXiv:2503.14476; its overlong penalty is overlong_buffer_tokens, off here
    Preset.dapo: {**_AT_BEHAVIOR, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    # arXiv:2507.18071
    Preset.gspo: {
        **_AT_BEHAVIOR, "ratio_level": "geometric", "clip_low": 3e-4, "clip_high": 4e-4,
        "dual_clip": None, "aggregation": "sequence_mean_token_mean",
    },
    # arXiv:2507.20673
    Preset.gmpo: {
        **_AT_BEHAVIOR, "surrogate": "gmpo", "gmpo_log_clip": 0.4,
        "aggregation": "sequence_mean_token_mean",
    },
    # arXiv:2506.13585; cap of arXiv:2510.13786
    Preset.cispo: {**_AT_BEHAVIOR, "surrogate": "cispo", "ratio_cap": 5.0},
    # arXiv:2511.20347
    Preset.sapo: {
        **_AT_BEHAVIOR, "surrogate": "sapo", "sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05,
        "aggregation": "sequence_mean_token_mean",
    },
    # arXiv:2504.02546
    Preset.gpg: {**_SCORE, "advantage": "mean_only"},
    # arXiv:2402.14740
    Preset.rloo: {**_SCORE, "advantage": "rloo", "aggregation": "sequence_mean_token_sum"},
    # arXiv:2505.23585
    Preset.opo: {**_SCORE, "advantage": "opo", "aggregation": "sequence_mean_token_sum"},
    # prime-rl's max_rl advantage on the default objective
    Preset.maxrl: {"advantage": "maxrl"},
    # arXiv:2508.08221
    Preset.lite_ppo: {
        **_AT_BEHAVIOR, "advantage": "batch_std", "advantage_eps": 1e-6,
        "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None,
    },
    # arXiv:2501.03262
    Preset.reinforce_pp: {**_AT_BEHAVIOR, **_PPO_02, "advantage": "reinforce_pp"},
    # arXiv:2505.24298
    Preset.decoupled_ppo: {**_PPO_02, "behavior_weight": "mask", "behavior_weight_cap": 5.0},
    # arXiv:2512.06547
    Preset.a3po: {
        **_PPO_02, "proximal": "interpolate", "behavior_weight": "truncate",
        "behavior_weight_cap": 5.0,
    },
    # arXiv:2510.18855
    Preset.icepop: {
        "dual_clip": None, "behavior_weight": "mask", "behavior_weight_floor": 0.5,
        "behavior_weight_cap": 5.0,
    },
    # sequence-level masked importance sampling, as TRL has it
    Preset.mis: {
        "dual_clip": None, "behavior_weight": "mask", "behavior_weight_level": "sequence",
        "behavior_weight_cap": 3.0,
    },
    # rejection by the geometric mean, as verl has it
    Preset.geo_rs: {
        "dual_clip": None, "behavior_weight": "none", "reject_sequence_low": 0.99,
        "reject_sequence_high": 1.01, "reject_sequence_level": "geometric",
    },
    # arXiv:2505.24034
    Preset.aipo: {**_AT_BEHAVIOR, "surrogate": "cispo", "ratio_cap": 2.0},
    Preset.aipo_differentiable: {**_AT_BEHAVIOR, "surrogate": "ratio", "ratio_cap": 2.0},
    # arXiv:2512.16144
    Preset.prime_rl: {
        **_AT_BEHAVIOR, "advantage": "mean_only", "surrogate": "ratio",
        "reject_token_low": 0.125, "reject_token_high": 8.0, "reject_veto": 1e-3,
    },
    # arXiv:2602.04879
    Preset.dppo: {
        **_AT_BEHAVIOR, "advantage": "mean_only", "surrogate": "dppo", "dppo_delta_low": 0.2,
        "dppo_delta_high": 0.2, "ratio_cap": 20.0,
    },
    # arXiv:2503.14286
    Preset.topr: {
        **_AT_BEHAVIOR, "advantage": "mean_only", "surrogate": "topr", "ratio_level": "sequence",
        "aggregation": "sequence_mean_token_sum",
    },
    # arXiv:2510.06062, with a plain bound for its soft dual clip
    Preset.aspo: {**_AT_BEHAVIOR, "surrogate": "aspo", "ratio_cap": 3.0},
    # arXiv:2510.01161
    Preset.m2po: {**_AT_BEHAVIOR, "surrogate": "ratio", "reject_m2": 0.04},
    # arXiv:2512.02556; the paper gives no number for its threshold
    Preset.opsm: {
        **_AT_BEHAVIOR, "dual_clip": None, "reject_opsm": 0.5,
    },
    # nothing is corrected: the clip is around the proximal policy, the behavior policy ignored
    Preset.uncorrected: {"behavior_weight": "none"},
}  # fmt: skip
