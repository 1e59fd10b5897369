"""Vectors that are one call of the policy loss: name and config -> objective, batch, aggregation.

Part of check_vectors.py. Batches are padded [sequence][token] in the file and packed here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from async_grpo.algorithms import rejection, surrogates
from async_grpo.algorithms.aggregation import Aggregation, denominator, sequence_token_weights
from async_grpo.algorithms.behavior_weights import BehaviorWeightRule, WeightAction
from async_grpo.algorithms.diagnostics import one_per_sequence
from async_grpo.algorithms.importance import RatioLevel, log_ratio
from async_grpo.algorithms.kl import KLRule
from async_grpo.algorithms.losses import (
    Anchor,
    MaskFunction,
    Objective,
    PolicyLoss,
    TokenBatch,
    policy_loss,
)
from async_grpo.algorithms.sequences import Sequences

Values = dict[str, Any]
Config = Mapping[str, Any]

_AGGREGATIONS = {
    "token-mean": Aggregation.token_mean,
    "seq-mean-token-mean": Aggregation.sequence_mean_token_mean,
    "mean over sequences": Aggregation.sequence_mean_token_mean,
    "seq-mean-token-sum": Aggregation.sequence_mean_token_sum,
    "dr-grpo": Aggregation.constant,
}


class Packed:
    """A padded batch of the file as packed tokens."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.mask = torch.tensor(inputs["mask"], dtype=torch.float64).bool()
        rows = torch.arange(self.mask.shape[0])[:, None].expand(self.mask.shape)
        self.sequences = Sequences(rows[self.mask], self.mask.shape[0])
        self._inputs = inputs

    def __call__(self, name: str) -> Tensor:
        """[N] of the padded input `name`."""
        values = torch.tensor(self._inputs[name])
        if values.dtype is not torch.int64:
            values = torch.tensor(self._inputs[name], dtype=torch.float64)
        return values[self.mask]

    def has(self, name: str) -> bool:
        """Whether the file gives it."""
        return name in self._inputs

    def padded(self, values: Tensor) -> list[Any]:
        """[sequence][token], 0 on padding."""
        whole = torch.zeros(self.mask.shape, dtype=values.detach().dtype)
        whole[self.mask] = values.detach()
        return whole.tolist()


def solve(
    packed: Packed, objective: Objective, config: Config, *, proximal: str, anchor: str = "behav"
) -> tuple[Values, PolicyLoss]:
    """Loss, per-token losses and gradient; `proximal` and `anchor` name inputs."""
    policy = packed("logp").requires_grad_()
    batch = TokenBatch(
        policy_logprobs=policy,
        proximal_logprobs=packed(proximal) if proximal != "logp" else policy.detach(),
        behavior_logprobs=packed(anchor) if packed.has(anchor) else None,
        advantages=packed("adv"),
        sequences=packed.sequences,
        reference_logprobs=packed("ref") if packed.has("ref") else None,
    )
    result = policy_loss(batch, objective)
    loss = aggregate(result.per_token, packed, config)
    (gradient,) = torch.autograd.grad(loss, policy)
    values: Values = {
        "loss": float(loss.detach()),
        "per_token": packed.padded(result.per_token),
        "grad_logp": packed.padded(gradient),
        "keep": packed.padded(result.kept.double()),
        "masked_fraction": 1 - float(result.kept.double().mean()),
        "clip_frac": float(
            (result.surrogate.clipped_low | result.surrogate.clipped_high).double().mean()
        ),
    }
    kept = packed.sequences.sum(result.kept.double()) > 0
    values["keep_seq"] = kept.tolist()
    return values, result


def aggregate(per_token: Tensor, packed: Packed, config: Config) -> Tensor:
    """By config["agg"], every trained token in the denominator."""
    rule, counts = _AGGREGATIONS[config["agg"]], packed.sequences.lengths.tolist()
    weights = torch.tensor(sequence_token_weights(rule, counts), dtype=torch.float64)
    divisor = denominator(rule, counts, length=config.get("Lconst"))
    return (per_token * packed.sequences.spread(weights)).sum() / divisor


def _ppo(config: Config) -> surrogates.SurrogateFunction:
    return partial(
        surrogates.ppo, clip_low=config["eps_low"], clip_high=config["eps_high"],
        dual_clip=config.get("c"),
    )  # fmt: skip


def clipped(inputs: Mapping[str, Any], config: Config) -> Values:
    """GRPO, DAPO, Dr. GRPO, dual clip: one clip around the anchor of the config."""
    packed = Packed(inputs)
    kl = KLRule(config["beta"]) if config.get("beta") else None
    at_behavior = config["anchor"] != "prox"
    objective = Objective(
        surrogate=_ppo(config), anchor=Anchor.behavior if at_behavior else Anchor.proximal, kl=kl
    )
    anchor = config["anchor"] if at_behavior else "behav"
    values, _ = solve(packed, objective, config, proximal="prox" if packed.has("prox") else "logp",
                      anchor=anchor)  # fmt: skip
    if "c" in config:
        without = {key: value for key, value in config.items() if key != "c"}
        values["loss_without_dual"] = clipped(inputs, without)["loss"]
    return values


def gspo(inputs: Mapping[str, Any], config: Config) -> Values:
    """A geometric ratio, clipped."""
    objective = Objective(surrogate=_ppo(config), ratio_level=RatioLevel.geometric)
    packed = Packed(inputs)
    values, result = solve(packed, objective, config, proximal=config["anchor"])
    values["s"] = one_per_sequence(result.importance_ratio, packed.sequences).tolist()
    return values


def at_anchor(build: Callable[[Config], surrogates.SurrogateFunction], **parts: Any) -> Any:
    """A surrogate against the anchor that the config names, without a behavior weight."""

    def compute(inputs: Mapping[str, Any], config: Config) -> Values:
        at_behavior = config.get("anchor", "prox") == "behav"
        anchor = Anchor.behavior if at_behavior else Anchor.proximal
        objective = Objective(surrogate=build(config), anchor=anchor, **parts)
        # proximal = policy: what masks then compare is policy and behavior, as in the vectors
        proximal = "logp" if at_behavior else "prox"
        return solve(Packed(inputs), objective, config, proximal=proximal)[0]

    return compute


def _cispo(config: Config) -> surrogates.SurrogateFunction:
    floor = config.get("lower") or 0.0
    return partial(surrogates.cispo, ratio_floor=floor, ratio_cap=config["ratio_cap"])


def _sapo(config: Config) -> surrogates.SurrogateFunction:
    return partial(surrogates.sapo, tau_positive=config["tau_pos"], tau_negative=config["tau_neg"])


def _aspo(config: Config) -> surrogates.SurrogateFunction:
    cap = config["clip"]
    return partial(surrogates.aspo, ratio_cap=float("inf") if cap is None else cap)


def dppo(inputs: Mapping[str, Any], config: Config) -> Values:
    """DPPO; what it drops is a clip, not a mask."""
    packed = Packed(inputs)
    rule = partial(
        surrogates.dppo, delta_low=config["tv_low"], delta_high=config["tv_high"],
        ratio_cap=config["tis_cap"],
    )  # fmt: skip
    objective = Objective(surrogate=rule, anchor=Anchor.behavior)
    values, result = solve(packed, objective, config, proximal="logp")
    dropped = result.surrogate.clipped_low | result.surrogate.clipped_high
    values["keep"] = packed.padded((~dropped).double())
    values["delta_prob"] = packed.padded(packed("logp").exp() - packed("behav").exp())
    return values


def topr(inputs: Mapping[str, Any], config: Config) -> Values:
    """TOPR, and its weight of each sequence."""
    packed = Packed(inputs)
    low, high = config["neg_clip"]
    if config["pos_weight"] != 1:
        raise ValueError("TOPR is defined with weight 1 for positive advantages")
    objective = Objective(
        surrogate=partial(surrogates.topr, low=low, high=high),
        anchor=Anchor.behavior, ratio_level=RatioLevel.sequence,
    )  # fmt: skip
    values, _ = solve(packed, objective, config, proximal="logp")
    log_r = log_ratio(
        packed("logp"), packed("behav"), level=RatioLevel.sequence, sequences=packed.sequences
    )
    given = surrogates.SurrogateInput(
        packed("logp"), packed("behav"), log_r, packed("adv"), packed.sequences
    )
    weight = surrogates.topr_weight(given, low=low, high=high)
    values["w_seq"] = one_per_sequence(weight, packed.sequences).tolist()
    return values


def weighted(rule: Callable[[Config], BehaviorWeightRule | None], **parts: Any) -> Any:
    """Clip around the proximal policy, times a behavior weight, with masks."""

    def compute(inputs: Mapping[str, Any], config: Config) -> Values:
        packed = Packed(inputs)
        objective = Objective(
            surrogate=_ppo(config), weight=rule(config), rejection=_masks(config, **parts)
        )
        proximal = "prox" if config["anchor"] == "prox" else "logp"
        values, result = solve(packed, objective, config, proximal=proximal)
        values |= _weights_of(packed, proximal)
        if result.weight is not None:
            values["w"] = packed.padded(result.weight.raw)
        values["equals_tis_reinforce_grad"] = values["grad_logp"]
        if proximal == "logp":  # the identity: a truncated-weight REINFORCE loss by itself
            reinforce = Objective(surrogate=surrogates.reinforce, weight=rule(config))
            identity, _ = solve(packed, reinforce, config, proximal=proximal)
            values["equals_tis_reinforce_grad"] = identity["grad_logp"]
        return values

    return compute


def _weights_of(packed: Packed, proximal: str) -> Values:
    found = {}
    for name, level in (("w_seq", RatioLevel.sequence), ("w_geo", RatioLevel.geometric)):
        log_w = log_ratio(
            packed(proximal), packed("behav"), level=level, sequences=packed.sequences
        )
        found[name] = one_per_sequence(log_w.exp(), packed.sequences).tolist()
    return found


def _masks(config: Config, *, reject: RatioLevel | None = None) -> dict[str, MaskFunction]:
    if reject is None:
        return {}
    return {
        "bounds": lambda batch: rejection.outside(
            batch.proximal_logprobs, batch.required("behavior_logprobs", "bounds"),
            batch.sequences, level=reject, low=config["low"], high=config["high"],
        )
    }  # fmt: skip


def _truncate(config: Config, level: RatioLevel = RatioLevel.token) -> BehaviorWeightRule:
    return BehaviorWeightRule(WeightAction(config["action"]), level, cap=float(config["cap"]))


def _window(config: Config, level: RatioLevel = RatioLevel.token) -> BehaviorWeightRule:
    return BehaviorWeightRule(WeightAction.mask, level, config["low"], config["high"])


def two_sided(inputs: Mapping[str, Any], config: Config) -> Values:
    """prime-rl: a token window and a veto, on the differentiable ratio to the behavior policy."""

    def token(batch: TokenBatch) -> Tensor:
        return rejection.outside(
            batch.proximal_logprobs, batch.required("behavior_logprobs", "window"),
            batch.sequences, level=RatioLevel.token, low=config["token_low"],
            high=config["token_high"],
        )  # fmt: skip

    def veto(batch: TokenBatch) -> Tensor:
        return rejection.veto(
            batch.proximal_logprobs, batch.required("behavior_logprobs", "veto"),
            batch.sequences, threshold=config["sequence_mask_low"],
        )  # fmt: skip

    objective = Objective(
        surrogate=surrogates.ratio_product, anchor=Anchor.behavior,
        rejection={"token": token, "veto": veto},
    )  # fmt: skip
    return solve(Packed(inputs), objective, config, proximal="logp")[0]


def m2po(inputs: Mapping[str, Any], config: Config) -> Values:
    """M2PO, and AReaL's pool of all tokens beside it."""
    packed = Packed(inputs)
    policy, behavior, advantages = packed("logp"), packed("behav"), packed("adv")
    threshold = config["m2_threshold"]

    def mask(tokens: rejection.M2Tokens) -> Tensor:
        return rejection.m2(policy, behavior, advantages, threshold=threshold, tokens=tokens)

    found = {tokens: mask(tokens) for tokens in rejection.M2Tokens}
    paper = found[rejection.M2Tokens.trust_region]
    objective = Objective(
        surrogate=surrogates.ratio_product, anchor=Anchor.behavior,
        rejection={"m2": lambda _: paper},
    )  # fmt: skip
    values, _ = solve(packed, objective, config, proximal="logp")
    for tokens, prefix in (
        (rejection.M2Tokens.trust_region, ""),
        (rejection.M2Tokens.all, "all_tokens_"),
    ):
        mean = rejection.m2_mean(policy, behavior, advantages, tokens)
        values[f"{prefix}m2_before"] = mean
        values[f"{prefix}masked_tokens"] = int(found[tokens].sum())
        values[f"{prefix}mask"] = packed.padded((~found[tokens]).double())
    return values


_sequence = RatioLevel.sequence

COMPUTE: dict[str, Any] = {
    "loss_grpo_clip02_behav_anchor": clipped,
    "loss_grpo_clip02_k3_beta004": clipped,
    "loss_dapo_token_mean_cliphigher": clipped,
    "loss_dr_grpo_const_len": clipped,
    "loss_dual_clip_c3": clipped,
    "loss_gspo": gspo,
    "loss_gspo_wide_clip": gspo,
    "loss_gmpo": at_anchor(lambda c: partial(surrogates.gmpo, log_clip=c["log_clip"])),
    "loss_cispo_verl_1plus_eps5": at_anchor(_cispo),
    "loss_cispo_trl_max5": at_anchor(_cispo),
    "loss_cispo_tight_1p28": at_anchor(_cispo),
    "loss_aipo_stopgrad": at_anchor(lambda c: partial(surrogates.cispo, ratio_cap=c["rho"])),
    "loss_aipo_differentiable_min": at_anchor(
        lambda c: partial(surrogates.ratio_product, ratio_cap=c["rho"])
    ),
    "loss_sapo": at_anchor(_sapo),
    "loss_gpg_reinforce": at_anchor(lambda _: surrogates.reinforce),
    "loss_aspo_flip_no_dualclip": at_anchor(
        lambda c: partial(
            surrogates.aspo, ratio_cap=float("inf" if c["clip"] is None else c["clip"])
        )
    ),
    "loss_dppo_binary_tv": dppo,
    "loss_topr": topr,
    "loss_decoupled_ppo_raw": weighted(lambda _: BehaviorWeightRule(WeightAction.truncate)),
    "loss_decoupled_ppo_cap_mask": weighted(_truncate),
    "loss_decoupled_ppo_tis_token": weighted(_truncate),
    "loss_decoupled_single_step_prox_is_theta": weighted(_truncate),
    "loss_icepop_token": weighted(_window),
    "loss_seq_tis": weighted(partial(_truncate, level=_sequence)),
    "loss_seq_mis": weighted(partial(_window, level=_sequence)),
    "loss_geo_rs": weighted(lambda _: None, reject=RatioLevel.geometric),
    "loss_prime_rl_two_sided_mask": two_sided,
    "loss_m2po": m2po,
}
