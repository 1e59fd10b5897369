"""Metrics of one train step, from what the step saw and what the replay server told.

Pure: no clock, no I/O. Names are declared in `metrics.registry`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from async_grpo.algorithms.staleness import sequence_staleness, split
from async_grpo.config.algorithm import AlgorithmSection, Proximal
from async_grpo.replay_parts import GeneratedStats
from async_grpo.training.off_policy_metrics import (
    by_staleness,
    engine_mismatch,
    ess_of_each,
    off_policy_metrics,
)
from async_grpo.training.step import StepOutcome
from async_grpo.training.token_facts import TokenFacts
from async_grpo.types import DropReason, FinishReason, ReissueReason, RolloutGroup


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
    for wasted in (ReissueReason.REQUEUED, ReissueReason.SUPERSEDED, ReissueReason.LOST):
        values[f"reissued/{wasted.value}_tokens"] = generated.reissued_tokens.get(wasted, 0)
    return values


def token_metrics(
    outcome: StepOutcome,
    groups: Sequence[RolloutGroup],
    train_version: int,
    algorithm: AlgorithmSection,
) -> dict[str, float]:
    """Staleness, ratios, clips, divergences, entropy: over trained tokens."""
    facts = outcome.tokens
    staleness = _token_staleness(outcome, train_version)
    num_trained = len(staleness)
    num_sampled = sum(group.num_tokens for group in groups)
    values = {
        "tokens/trained": num_trained,
        "tokens/over_age": outcome.num_over_age,
        "masked_fraction": 1 - num_trained / num_sampled,
        "excluded_fraction": 1 - int(facts.kept.sum()) / num_sampled,
        "entropy": float(facts.entropy.mean()),
        "loss": float(np.mean(outcome.losses)),
        "grad_norm": float(np.mean(outcome.grad_norms)),
        "lr": outcome.lr,
    }
    values |= _staleness_metrics(outcome, groups, train_version)
    values |= off_policy_metrics(facts, algorithm)
    interpolated = algorithm.proximal is Proximal.interpolate
    values |= _lag0_gap(outcome, staleness, interpolated=interpolated)
    values |= by_staleness(facts, staleness, algorithm)
    if interpolated:
        values["proximal/interpolation_error"] = _interpolation_error(facts)
    return values


def _token_staleness(outcome: StepOutcome, train_version: int) -> Tensor:
    """[B] int64, of the trained tokens."""
    versions = np.concatenate([s.versions[s.trained] for s in outcome.sequences])
    return torch.from_numpy(train_version - versions).to(outcome.tokens.entropy.device)


def ess_by_lag(
    outcome: StepOutcome, train_version: int, algorithm: AlgorithmSection
) -> dict[int, tuple[int, float]]:
    """Staleness -> (trained tokens, ESS of their raw weights as a fraction), for the controller.

    Against the policy that the step started from: where the proximal one is interpolated, it is
    known on the tokens of the first update.
    """
    facts, staleness = outcome.tokens, _token_staleness(outcome, train_version)
    if algorithm.proximal is not Proximal.interpolate:
        return ess_of_each(facts.behavior_logprobs, facts.proximal_logprobs, staleness)
    first = slice(facts.num_first_update)
    return ess_of_each(
        facts.behavior_logprobs[first], facts.policy_logprobs[first], staleness[first]
    )


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
    return engine_mismatch(facts.behavior_logprobs[chosen], proximal[chosen])
