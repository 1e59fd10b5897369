"""Tokens that are too old are context, never trained; groups weigh what they stand for."""

import copy
from dataclasses import replace

import pytest
import torch

from async_grpo.config.algorithm import Aggregation, AlgorithmSection
from async_grpo.config.trainer import TrainerSection
from async_grpo.metrics.registry import checked
from async_grpo.training.step import TrainStep
from async_grpo.training.step_metrics import token_metrics
from tests.fakes.tiny_policy import random_groups, tiny_policy


def gradient_of(groups, algorithm=None, *, max_staleness=None, weights=None, **trainer):
    policy = tiny_policy()
    section = TrainerSection(
        **({"lr": 1e-2, "tokens_per_microbatch": 10_000, "max_grad_norm": 1e9} | trainer)
    )
    step = TrainStep(
        policy, algorithm or AlgorithmSection(), section, num_train_steps=10,
        max_staleness=max_staleness,
    )  # fmt: skip
    outcome = step.apply(groups, 1, weights=weights)
    state = step.optimizer._adamw.state
    first = [state[p]["exp_avg"].flatten() / 0.1 for p in policy.module.parameters()]
    return torch.cat(first), outcome


def without_version_zero(groups):
    """The same groups; what version 0 sampled is marked as not trainable."""
    changed = copy.deepcopy(groups)
    for group in changed:
        for rollout in group.rollouts:
            (sequence,) = rollout.sequences
            sequence.segments = [
                replace(run, trainable=run.weights.policy_version > 0) for run in sequence.segments
            ]
    return changed


@pytest.mark.parametrize("aggregation", Aggregation)
def test_too_old_tokens_are_trained_as_if_nobody_could_train_them(aggregation):
    algorithm = AlgorithmSection(aggregation=aggregation, length_limit=9)
    groups = random_groups(3, version=1)  # heads of version 0, tails of version 1

    found, outcome = gradient_of(groups, algorithm, max_staleness=0)
    expected, marked = gradient_of(without_version_zero(groups), algorithm)
    everything, whole = gradient_of(groups, algorithm, max_staleness=1)

    assert torch.equal(found, expected)
    assert not torch.allclose(found, everything)
    trained = [token for s in outcome.sequences for token in s.versions[s.trained].tolist()]
    assert set(trained) == {1}
    assert outcome.num_over_age == len(whole.tokens.entropy) - len(trained) > 0
    assert (marked.num_over_age, whole.num_over_age) == (0, 0)


def test_advantages_still_come_from_all_rewards():
    groups = random_groups(2, version=1)
    _, outcome = gradient_of(groups, max_staleness=0)
    _, whole = gradient_of(groups, max_staleness=1)

    everywhere = {s.advantage for s in whole.sequences}
    assert {s.advantage for s in outcome.sequences} <= everywhere


@pytest.mark.parametrize("budget", [1, 64, 10_000])
@pytest.mark.parametrize("aggregation", Aggregation)
def test_group_weights_scale_each_groups_gradient(aggregation, budget):
    algorithm = AlgorithmSection(aggregation=aggregation, length_limit=9)
    groups = random_groups(2, version=1)
    alone = [
        gradient_of(groups, algorithm, weights=weights)[0] for weights in ([2.0, 0.0], [0.0, 2.0])
    ]

    found, _ = gradient_of(groups, algorithm, weights=[3.0, 1.0], tokens_per_microbatch=budget)

    # The model's norms compute in float32: another scale is another rounding.
    expected = 1.5 / 2 * alone[0] + 0.5 / 2 * alone[1]
    bound = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def test_equal_weights_change_nothing():
    groups = random_groups(3, version=1)
    plain, outcome = gradient_of(groups)
    weighted, other = gradient_of(groups, weights=[2.5, 2.5, 2.5])

    assert torch.equal(plain, weighted)
    assert outcome.losses == other.losses


def test_metrics_are_over_trained_tokens_and_count_the_others():
    groups = random_groups(2, version=1)
    num_sampled = sum(group.num_tokens for group in groups)
    _, outcome = gradient_of(groups, max_staleness=0)

    values = checked(token_metrics(outcome, groups, 1, AlgorithmSection()))

    assert values["tokens/over_age"] == outcome.num_over_age > 0
    assert values["tokens/trained"] == num_sampled - outcome.num_over_age
    assert values["masked_fraction"] == pytest.approx(outcome.num_over_age / num_sampled)
    assert values["staleness/max"] == values["staleness/mean"] == 0
