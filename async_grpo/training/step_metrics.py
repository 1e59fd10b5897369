"""Metrics of one train step, from what the step saw and what the replay server told.

Pure: no clock, no I/O. Names are declared in `metrics.registry`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from async_grpo.algorithms import diagnostics
from async_grpo.algorithms.staleness import BUCKETS, sequence_staleness, split
from async_grpo.config.algorithm import AlgorithmSection, Proximal
from async_grpo.replay_parts import GeneratedStats
from async_grpo.training.step import StepOutcome
from async_grpo.training.token_facts import TokenFacts
from async_grpo.types import DropReason, FinishReason, RolloutGroup


def group_metrics(
    groups: Sequence[RolloutGroup], generated: GeneratedStats, in_queue_s: Sequence[float]
) -> dict[str, float]:
    """Rewards, lengths and counts: over what was trained and over all that finished.

    Args:
        groups: of this step.
        generated: all that finished since the draw before.
        in_queue_s: of each group, from insert to the start of the step.
    """
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    lengths = [rollout.num_tokens for group in groups for rollout in group.rollouts]
    sequences = [s for group in groups for r in group.rollouts for s in r.sequences]
    spreads = [float(np.std(values)) for values in rewards]
    trained_mean = float(np.mean([value for values in rewards for value in values]))
    no_signal = generated.dropped.get(DropReason.NO_SIGNAL, 0)
    tied = sum(1 for values in rewards if min(values) == max(values))
    finished = generated.num_completions
    values = {
        "reward/mean": generated.reward_sum / finished if finished else trained_mean,
        "reward/trained_mean": trained_mean,
        "reward/group_std": float(np.mean(spreads)),
        "zero_variance_fraction": (tied + no_signal) / (len(groups) + no_signal),
        "completion/length_mean": float(np.mean(lengths)),
        "completion/truncated_fraction": float(
            np.mean([s.finish_reason is FinishReason.LENGTH for s in sequences])
        ),
        "staleness/in_queue_s": float(np.mean(in_queue_s)),
        "tokens/generated": generated.num_tokens,
        "groups/generated": generated.num_groups,
        "groups/trained": len(groups),
    }
    if finished:
        values["completion/generated_length_mean"] = generated.num_tokens / finished
    for reason in DropReason:
        values[f"dropped/{reason.value}_groups"] = generated.dropped.get(reason, 0)
        values[f"dropped/{reason.value}_tokens"] = generated.dropped_tokens.get(reason, 0)
    return values


def token_metrics(
    outcome: StepOutcome,
    groups: Sequence[RolloutGroup],
    train_version: int,
    algorithm: AlgorithmSection,
) -> dict[str, float]:
    """Staleness, ratios, clips, divergences, entropy: over trained tokens."""
    facts, sequences = outcome.tokens, outcome.sequences
    versions = np.concatenate([s.versions[s.trained] for s in sequences])
    staleness = torch.from_numpy(train_version - versions).to(facts.entropy.device)
    num_trained = len(versions)
    num_sampled = sum(group.num_tokens for group in groups)
    values = {
        "tokens/trained": num_trained,
        "masked_fraction": 1 - num_trained / num_sampled,
        "entropy": float(facts.entropy.mean()),
        "loss": float(np.mean(outcome.losses)),
        "grad_norm": float(np.mean(outcome.grad_norms)),
        "lr": outcome.lr,
    }
    values |= _staleness_metrics(outcome, groups, train_version)
    values |= _off_policy_metrics(facts, algorithm)
    values |= _weight_metrics(facts)
    values |= _rejection_metrics(facts)
    interpolated = algorithm.proximal is Proximal.interpolate
    values |= _lag0_gap(outcome, staleness, interpolated=interpolated)
    values |= _by_staleness(facts, staleness)
    if interpolated:
        values["proximal/interpolation_error"] = _interpolation_error(facts)
    return values


def _staleness_metrics(
    outcome: StepOutcome, groups: Sequence[RolloutGroup], train_version: int
) -> dict[str, float]:
    by_group: list[list[int]] = [[] for _ in groups]
    for sequence in outcome.sequences:
        by_group[sequence.group] += sequence.versions[sequence.trained].tolist()
    parts = split(train_version, by_group)
    trained = [len(versions) for versions in by_group]
    seconds = [group.sampled_ago_s for group in groups]
    ends = [
        sequence_staleness(train_version, s.versions[s.trained].tolist()) for s in outcome.sequences
    ]
    return {
        "staleness/head_mean": float(np.mean([end.head for end in ends])),
        "staleness/tail_mean": float(np.mean([end.tail for end in ends])),
        "staleness/version_span_mean": float(np.mean([end.version_span for end in ends])),
        "staleness/mean": parts.mean,
        "staleness/max": parts.max,
        "staleness/in_flight": parts.in_flight,
        "staleness/in_queue": parts.in_queue,
        "staleness/in_flight_s": float(np.average(seconds, weights=trained)),
    }


def _off_policy_metrics(facts: TokenFacts, algorithm: AlgorithmSection) -> dict[str, float]:
    """Over all trained tokens, before any mask, from raw ratios."""
    policy, proximal, behavior = (
        facts.policy_logprobs,
        facts.proximal_logprobs,
        facts.behavior_logprobs,
    )
    values = {}
    for anchor, logprobs in (("behavior", behavior), ("proximal", proximal)):
        for name, value in diagnostics.ratio_statistics(policy, logprobs).items():
            values[f"ratio/{anchor}_{name}"] = value
    gap = diagnostics.divergence(behavior, proximal)
    whole = diagnostics.sequence_divergence(behavior, proximal, facts.sequences)
    spread = diagnostics.perplexity(behavior, proximal, facts.sequences)
    ratio = (policy - behavior).exp()
    outside = (ratio < 1 - algorithm.clip_low) | (ratio > 1 + algorithm.clip_high)
    values |= {
        "clip/low_fraction": diagnostics.fraction(facts.clipped_low),
        "clip/high_fraction": diagnostics.fraction(facts.clipped_high),
        "clip/dual_fraction": diagnostics.fraction(facts.clipped_dual),
        "clip/behavior_fraction": diagnostics.fraction(outside),
        "ess/raw": gap["ess"],
        "ess/sequence_raw": whole["ess"],
        "kl/behavior_k1": gap["k1"],
        "kl/behavior_k3": gap["k3"],
        "chi2/token": gap["chi2"],
        "chi2/sequence": whole["chi2"],
        "m2": gap["m2"],
        "perplexity/behavior": spread["sampling"],
        "perplexity/proximal": spread["other"],
        "perplexity/log_abs_gap": spread["log_abs_gap"],
    }
    if facts.reference_kl is not None:
        values["kl/reference"] = float(facts.reference_kl.mean())
    return values


def _weight_metrics(facts: TokenFacts) -> dict[str, float]:
    """The behavior weight before and after its bounds; a cap must not hide what it cuts."""
    if not facts.weighted:
        return {}
    raw, applied = facts.behavior_weight_raw.double(), facts.behavior_weight
    return {
        "behavior_weight/raw_mean": float(raw.mean()),
        "behavior_weight/raw_min": float(raw.min()),
        "behavior_weight/raw_max": float(raw.max()),
        "behavior_weight/mean": float(applied.mean()),
        "behavior_weight/truncated_fraction": diagnostics.fraction(facts.weight_bounded),
        "ess/truncated": diagnostics.effective_sample_size(applied),
        "ess/sequence_truncated": diagnostics.effective_sample_size(
            facts.sequences.mean(applied.double())
        ),
    }


def _rejection_metrics(facts: TokenFacts) -> dict[str, float]:
    """What masks took out, by mask; and the tokens that are left, by themselves."""
    if not facts.rejected:
        return {}
    kept = facts.kept
    sequences_left = facts.sequences.sum(kept.double()) > 0
    values = {
        "rejected/token_fraction": 1 - diagnostics.fraction(kept),
        "rejected/sequence_fraction": 1 - diagnostics.fraction(sequences_left),
    }
    for name, mask in facts.rejected.items():
        values[f"rejected/{name}_fraction"] = diagnostics.fraction(mask)
    behavior, proximal = facts.behavior_logprobs[kept], facts.proximal_logprobs[kept]
    if kept.any():
        gap = diagnostics.divergence(behavior, proximal)
        values["kept/ess"], values["kept/k3"] = gap["ess"], gap["k3"]
        values["kept/ratio_mean"] = diagnostics.ratio_statistics(proximal, behavior)["mean"]
    return values


def _interpolation_error(facts: TokenFacts) -> float:
    """Mean |interpolated - real| proximal log-prob, where the real one is known.

    That is on the tokens of the first update: it was made from the weights of the step's start.
    """
    first = slice(facts.num_first_update)
    return float((facts.proximal_logprobs[first] - facts.policy_logprobs[first]).abs().mean())


def _lag0_gap(outcome: StepOutcome, staleness: Tensor, *, interpolated: bool) -> dict[str, float]:
    """Engine mismatch alone: tokens of whole completions by the weights of this very version."""
    pure = np.concatenate([np.full(s.num_trained, s.pure) for s in outcome.sequences])
    chosen = torch.from_numpy(pure).to(staleness.device) & (staleness == 0)
    if not chosen.any():
        return {}
    facts = outcome.tokens
    proximal = facts.proximal_logprobs
    if interpolated:  # for fresh tokens that is the behavior policy itself: look at the real one
        proximal = facts.policy_logprobs
        chosen &= torch.arange(len(chosen), device=chosen.device) < facts.num_first_update
        if not chosen.any():
            return {}
    gap = (proximal - facts.behavior_logprobs)[chosen].abs()
    return {"logprob/lag0_gap": float(gap.mean())}


def _by_staleness(facts: TokenFacts, staleness: Tensor) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, first, last in BUCKETS:
        chosen = staleness >= first
        if last is not None:
            chosen &= staleness <= last
        count = int(chosen.sum())
        if not count:
            continue
        behavior, proximal = facts.behavior_logprobs[chosen], facts.proximal_logprobs[chosen]
        gap = diagnostics.divergence(behavior, proximal)
        values |= {
            f"by_staleness/{name}/tokens": count,
            f"by_staleness/{name}/ess": gap["ess"],
            f"by_staleness/{name}/k3": gap["k3"],
            f"by_staleness/{name}/ratio_mean": diagnostics.ratio_statistics(proximal, behavior)[
                "mean"
            ],
        }
        if facts.weighted:
            bounded = diagnostics.fraction(facts.weight_bounded[chosen])
            values[f"by_staleness/{name}/truncated_fraction"] = bounded
    return values
