"""The step's gradient does not depend on how the batch is laid out; its numbers are the math's."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_grpo.config.algorithm import Aggregation as ConfigAggregation
from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.trainer import LRSchedule, TrainerSection
from async_grpo.errors import NumericsError
from async_grpo.training.batching import TrainSequence
from async_grpo.training.model import PolicyModel
from async_grpo.training.optimizer import PolicyOptimizer, learning_rate
from async_grpo.training.step import TrainStep
from tests.fakes.tiny_policy import random_groups, tiny_module, tiny_policy

AGGREGATIONS = list(ConfigAggregation)


def settings(**changes):
    base = {"lr": 1e-2, "tokens_per_microbatch": 10_000, "max_grad_norm": 1e9}
    return TrainerSection(**(base | changes))


def gradients_of(groups, *, algorithm=None, reference=None, **changes):
    """Gradients of the first update: AdamW's first moment is (1 - beta1) * gradient."""
    policy = tiny_policy()
    step = TrainStep(
        policy, algorithm or AlgorithmSection(), settings(**changes), num_train_steps=10,
        reference=reference,
    )  # fmt: skip
    outcome = step.apply(groups, 1)
    state = step.optimizer._adamw.state
    flat = [state[p]["exp_avg"].flatten() / 0.1 for p in policy.module.parameters()]
    return torch.cat(flat), outcome


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_gradient_is_the_same_under_permuting_and_splitting(aggregation, kl_coef):
    groups = random_groups(5, version=1)
    limit = 7 if aggregation is ConfigAggregation.constant else None
    algorithm = AlgorithmSection(aggregation=aggregation, kl_coef=kl_coef, length_limit=limit)
    reference = tiny_policy(seed=3) if kl_coef else None
    expected, outcome = gradients_of(groups, algorithm=algorithm, reference=reference)
    assert expected.abs().max() > 1e-3
    for order in (slice(None, None, -1), slice(None)):
        for budget in (1, 30, 64, 200):
            found, other = gradients_of(
                groups[order], algorithm=algorithm, reference=reference,
                tokens_per_microbatch=budget,
            )  # fmt: skip
            assert_same(found, expected)
            assert other.losses[0] == pytest.approx(outcome.losses[0], abs=1e-9)


def naive_loss(module, groups, algorithm):
    """One sequence, one token at a time; no packing, no shared code with the step."""
    total, count = 0.0, 0
    for group in groups:
        rewards = np.array([r.reward for r in group.rollouts])
        scores = (rewards - rewards.mean()) / (rewards.std() + algorithm.advantage_eps)
        for rollout, advantage in zip(group.rollouts, scores, strict=True):
            (sequence,) = rollout.sequences
            ids = torch.tensor([*sequence.prompt_token_ids, *sequence.token_ids])
            logits = module(input_ids=ids[None], use_cache=False).logits[0]
            for position in range(len(sequence.prompt_token_ids), len(ids)):
                scaled = logits[position - 1] / sequence.temperature
                logprob = scaled.log_softmax(-1)[ids[position]]
                index = position - len(sequence.prompt_token_ids)
                behavior = float(sequence.behavior_logprobs[index])
                weight = (logprob.detach() - behavior).exp().clamp(max=2.0)
                total = total - weight * (logprob - logprob.detach()).exp() * advantage
                count += 1
    return total / count


def test_gradient_equals_a_naive_loop():
    groups = random_groups(3, version=1)
    module = tiny_module()
    loss = naive_loss(module, groups, AlgorithmSection())
    loss.backward()
    naive = torch.cat([p.grad.flatten() for p in module.parameters()])
    found, outcome = gradients_of(groups)
    assert_same(found, naive)
    assert outcome.losses[0] == pytest.approx(float(loss.detach()), abs=1e-12)
    assert outcome.grad_norms[0] == pytest.approx(float(naive.norm()), rel=1e-9)


def test_several_updates_clip_around_the_policy_of_the_step():
    groups = random_groups(4, version=1)
    policy = tiny_policy()
    before = tiny_policy()
    step = TrainStep(
        policy, AlgorithmSection(), settings(lr=0.05, updates_per_step=2), num_train_steps=10
    )
    outcome = step.apply(groups, 1)
    facts = outcome.tokens
    half = sum(s.num_trained for s in outcome.sequences if s.group < 2)
    assert_same(facts.policy_logprobs[:half], facts.proximal_logprobs[:half])
    assert (facts.policy_logprobs[half:] - facts.proximal_logprobs[half:]).abs().max() > 1e-3
    one = TrainStep(before, AlgorithmSection(), settings(), num_train_steps=10).apply(groups, 1)
    assert_same(facts.proximal_logprobs, one.tokens.policy_logprobs)
    assert len(outcome.losses) == 2


def test_one_update_is_its_own_proximal_policy():
    _, outcome = gradients_of(random_groups(2, version=1))
    facts = outcome.tokens
    assert torch.equal(facts.policy_logprobs, facts.proximal_logprobs)
    assert not facts.clipped_low.any()
    assert not facts.clipped_high.any()


def test_a_loss_that_is_not_finite_names_the_step_and_changes_nothing():
    groups = random_groups(2, version=1)
    groups[1].rollouts[0].reward = float("inf")
    policy = tiny_policy()
    before = copy.deepcopy(policy.module.state_dict())
    step = TrainStep(policy, AlgorithmSection(), settings(), num_train_steps=10)
    with pytest.raises(NumericsError, match=r"from version 7.*0/0, 1/0"):
        step.apply(groups, 7)
    for name, tensor in policy.module.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_batch_without_a_trained_token_is_refused():
    groups = random_groups(1, version=0)
    for rollout in groups[0].rollouts:
        sequence = rollout.sequences[0]
        sequence.segments = [replace(sequence.segments[0], trainable=False)]
    step = TrainStep(tiny_policy(), AlgorithmSection(), settings(), num_train_steps=10)
    with pytest.raises(ValueError, match="token to train on"):
        step.apply(groups, 0)


def test_a_tied_group_counts_in_the_denominator_and_in_the_metrics_only():
    groups = random_groups(3, version=1)
    for rollout in groups[1].rollouts:
        rollout.reward = 0.25
    module = tiny_module()
    loss = naive_loss(module, groups, AlgorithmSection())
    loss.backward()
    found, outcome = gradients_of(groups)
    assert_same(found, torch.cat([p.grad.flatten() for p in module.parameters()]))
    assert len(outcome.tokens.entropy) == sum(group.num_tokens for group in groups)
    assert (outcome.tokens.policy_logprobs < 0).all()
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = 1.0
    found, outcome = gradients_of(groups)
    assert outcome.losses == [0.0]
    assert outcome.grad_norms == [0.0]


def test_learning_rate_schedule():
    constant = settings(lr=2.0, warmup_steps=4)
    assert [learning_rate(constant, n, 10) for n in (0, 1, 3, 4, 9)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    cosine = settings(lr=2.0, warmup_steps=2, lr_schedule=LRSchedule.cosine)
    rates = [learning_rate(cosine, n, 12) for n in range(13)]
    assert rates[2] == 2.0
    assert rates[7] == pytest.approx(1.0)
    assert rates[12] == pytest.approx(0.0)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_bfloat16_weights_move_by_updates_smaller_than_their_spacing():
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = PolicyOptimizer([("p", parameter)], settings(lr=1e-4))
    for _ in range(100):
        parameter.sum().backward()
        parameter.sum().backward()
        assert optimizer.clip() == pytest.approx(4.0)
        optimizer.step(1e-4)
        optimizer.zero_grad()
    assert parameter.dtype is torch.bfloat16
    assert float(parameter[0].detach()) == pytest.approx(0.99, abs=0.004)


def test_clipping_scales_the_gradient_and_reports_the_norm_before():
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = PolicyOptimizer([("p", parameter)], settings(max_grad_norm=1.0))
    (3.0 * parameter).sum().backward()
    assert optimizer.clip() == pytest.approx(6.0)
    assert float(parameter.grad.norm()) == pytest.approx(1.0, rel=1e-5)


def test_sequence_counts_inputs_without_the_last_token():
    sequence = TrainSequence(
        0, np.arange(5), 2, np.ones(3, bool), np.zeros(3, np.float32), np.zeros(3, np.int64),
        0.0, 1.0, True, 3,
    )  # fmt: skip
    assert sequence.num_input_tokens == 4
    assert isinstance(tiny_policy(), PolicyModel)
