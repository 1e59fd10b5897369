"""How far the policies are apart and what was done about it: per batch, and by staleness.

Raw ratios and bounded weights, all tokens and those that masks left, are told apart by name. Pure.
"""

import dataclasses
from typing import Any

from torch import Tensor

from async_grpo.algorithms import diagnostics
from async_grpo.algorithms.sequences import Sequences
from async_grpo.algorithms.staleness import BUCKETS
from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.training.token_facts import TokenFacts


def off_policy_metrics(facts: TokenFacts, algorithm: AlgorithmSection) -> dict[str, float]:
    """Every off-policy statistic, over all tokens of `facts` and over its sequences."""
    return _of_tokens(facts, algorithm) | _of_sequences(facts)


def by_staleness(
    facts: TokenFacts, staleness: Tensor, algorithm: AlgorithmSection
) -> dict[str, float]:
    """The same statistics of each bucket: of its tokens, and of sequences whose oldest is in it.

    Args:
        facts: of the batch.
        staleness: [B] int64, in train steps.
        algorithm: section `algorithm`.
    """
    oldest = -facts.sequences.min(-staleness.double())
    of_sequence = facts.sequences.spread(oldest)
    values: dict[str, float] = {}
    for name, first, last in BUCKETS:
        tokens = _within(staleness, first, last)
        if tokens.any():
            values |= _under(name, _of_tokens(chosen(facts, tokens), algorithm))
            values[f"by_staleness/{name}/tokens"] = int(tokens.sum())
        whole = _within(of_sequence, first, last)
        if whole.any():
            values |= _under(name, _of_sequences(chosen(facts, whole)))
    return values


def _within(staleness: Tensor, first: int, last: int | None) -> Tensor:
    inside = staleness >= first
    return inside if last is None else inside & (staleness <= last)


def _under(bucket: str, values: dict[str, float]) -> dict[str, float]:
    return {f"by_staleness/{bucket}/{name}": value for name, value in values.items()}


def chosen(facts: TokenFacts, mask: Tensor) -> TokenFacts:
    """The tokens where `mask` [B] is True, as facts of their own."""
    picked: dict[str, Any] = {
        field.name: value[mask]
        for field in dataclasses.fields(facts)
        if isinstance(value := getattr(facts, field.name), Tensor)
    }
    return dataclasses.replace(
        facts,
        **picked,
        rejected={name: rejected[mask] for name, rejected in facts.rejected.items()},
        sequences=Sequences.of(facts.sequences.index[mask]),
    )


def _of_tokens(facts: TokenFacts, algorithm: AlgorithmSection) -> dict[str, float]:
    values = _apart(facts, algorithm) | _clips(facts)
    if facts.reference_kl is not None:
        values["kl/reference"] = float(facts.reference_kl.mean())
    if facts.weighted:
        values |= _weights(facts)
    if facts.rejected:
        values |= _rejections(facts)
    return values


def _apart(facts: TokenFacts, algorithm: AlgorithmSection) -> dict[str, float]:
    """From raw ratios, before any mask."""
    policy, behavior = facts.policy_logprobs, facts.behavior_logprobs
    values: dict[str, float] = {}
    for anchor, logprobs in (("behavior", behavior), ("proximal", facts.proximal_logprobs)):
        for name, value in diagnostics.ratio_statistics(policy, logprobs).items():
            values[f"ratio/{anchor}_{name}"] = value
    ratio = (policy - behavior).exp()
    outside = (ratio < 1 - algorithm.clip_low) | (ratio > 1 + algorithm.clip_high)
    gap = diagnostics.divergence(behavior, facts.proximal_logprobs)
    return values | {
        "clip/behavior_fraction": diagnostics.fraction(outside),
        "ess/raw": gap["ess"],
        "kl/behavior_k1": gap["k1"],
        "kl/behavior_k3": gap["k3"],
        "chi2/token": gap["chi2"],
        "m2": gap["m2"],
    }


def _clips(facts: TokenFacts) -> dict[str, float]:
    low, high, dual = facts.clipped_low, facts.clipped_high, facts.clipped_dual
    return {
        "clip/low_fraction": diagnostics.fraction(low),
        "clip/high_fraction": diagnostics.fraction(high),
        "clip/dual_fraction": diagnostics.fraction(dual),
        "clip/fraction": diagnostics.fraction(low | high | dual),
    }


def _weights(facts: TokenFacts) -> dict[str, float]:
    """The behavior weight before and after its bounds; a cap must not hide what it cuts."""
    raw, applied = facts.behavior_weight_raw.double(), facts.behavior_weight
    return {
        "behavior_weight/raw_mean": float(raw.mean()),
        "behavior_weight/raw_min": float(raw.min()),
        "behavior_weight/raw_max": float(raw.max()),
        "behavior_weight/mean": float(applied.double().mean()),
        "behavior_weight/truncated_fraction": diagnostics.fraction(facts.weight_bounded),
        "ess/truncated": diagnostics.effective_sample_size(applied),
    }


def _rejections(facts: TokenFacts) -> dict[str, float]:
    """What masks took out, by mask; and the tokens that are left, by themselves."""
    kept = facts.kept
    values = {"rejected/token_fraction": 1 - diagnostics.fraction(kept)}
    for name, mask in facts.rejected.items():
        values[f"rejected/{name}_fraction"] = diagnostics.fraction(mask)
    if kept.any():
        behavior, proximal = facts.behavior_logprobs[kept], facts.proximal_logprobs[kept]
        gap = diagnostics.divergence(behavior, proximal)
        values["kept/ess"], values["kept/k3"] = gap["ess"], gap["k3"]
        values["kept/ratio_mean"] = diagnostics.ratio_statistics(proximal, behavior)["mean"]
    return values


def _of_sequences(facts: TokenFacts) -> dict[str, float]:
    behavior, proximal, sequences = (
        facts.behavior_logprobs,
        facts.proximal_logprobs,
        facts.sequences,
    )
    whole = diagnostics.sequence_divergence(behavior, proximal, sequences)
    spread = diagnostics.perplexity(behavior, proximal, sequences)
    values = {
        "ess/sequence_raw": whole["ess"],
        "chi2/sequence": whole["chi2"],
        "perplexity/behavior": spread["sampling"],
        "perplexity/proximal": spread["other"],
        "perplexity/log_abs_gap": spread["log_abs_gap"],
    }
    if facts.weighted:
        applied = sequences.mean(facts.behavior_weight.double())
        values["ess/sequence_truncated"] = diagnostics.effective_sample_size(applied)
    if facts.rejected:
        left = sequences.sum(facts.kept.double()) > 0
        values["rejected/sequence_fraction"] = 1 - diagnostics.fraction(left)
    return values


def engine_mismatch(behavior_logprobs: Tensor, policy_logprobs: Tensor) -> dict[str, float]:
    """What engine and trainer make of the same weights, both [N], N > 0; 0 were they one program.

    Args:
        behavior_logprobs: as the engine returned them.
        policy_logprobs: the trainer's, of the weights that sampled the tokens.
    """
    gap = (policy_logprobs - behavior_logprobs).double()
    apart = diagnostics.divergence(behavior_logprobs, policy_logprobs)
    return {
        "logprob/lag0_tokens": gap.numel(),
        "logprob/lag0_gap": float(gap.abs().mean()),
        "logprob/lag0_gap_max": float(gap.abs().max()),
        "logprob/lag0_k1": apart["k1"],
        "logprob/lag0_k3": apart["k3"],
        "logprob/lag0_ess": apart["ess"],
    }


def ess_of_each(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, staleness: Tensor
) -> dict[int, tuple[int, float]]:
    """Staleness -> (tokens, effective sample size of their raw weights, as a fraction)."""
    found = {}
    for lag in sorted(set(staleness.tolist())):
        mask = staleness == lag
        gap = diagnostics.divergence(behavior_logprobs[mask], policy_logprobs[mask])
        found[lag] = (int(mask.sum()), gap["ess"])
    return found
