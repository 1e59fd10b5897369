"""The probe's ids and what the trainer knows of its own rounding."""

import math

import pytest
import torch

from async_grpo.config.policy import DType
from async_grpo.config.weights import PROBE_LIMITS, WeightsSection
from async_grpo.training.probe import (
    logprobs_of,
    measure_noise,
    own_noise,
    sample_ids,
    sample_probe,
)
from async_grpo.training.weight_source import PolicyWeights
from tests.fakes.tiny_policy import tiny_policy


def test_ids_are_sampled_by_the_policy_and_the_same_each_time():
    policy = tiny_policy(dtype=torch.float32)
    with torch.no_grad():
        policy.module.get_output_embeddings().weight.mul_(20.0)  # far from uniform
    sets = sample_ids(policy, num_sets=2, num_tokens=40, seed=3)
    assert [len(ids) for ids in sets] == [40, 40]
    assert sets[0] != sets[1]
    assert sets == sample_ids(policy, num_sets=2, num_tokens=40, seed=3)
    random = torch.randint(0, policy.vocab_size, (2, 40)).tolist()
    assert logprobs_of(policy, sets).mean() > logprobs_of(policy, random).mean() + 0.5


def test_sampling_leaves_the_random_numbers_of_training_as_they_were():
    policy = tiny_policy(dtype=torch.float32)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    sample_ids(policy, num_sets=2, num_tokens=8, seed=0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("context", "length"), [(16, 16), (512, 133)])
def test_the_probe_is_as_long_as_the_dtype_needs_and_the_context_holds(context, length):
    policy = tiny_policy(dtype=torch.bfloat16)
    policy.module.config.max_position_embeddings = context
    assert [len(ids) for ids in sample_probe(policy, seed=0)] == [length, length]


def test_log_probs_of_a_set_are_those_of_the_models_logits():
    policy = tiny_policy(dtype=torch.float64)
    sets = sample_ids(policy, num_sets=2, num_tokens=9, seed=0)
    logits = policy.module(input_ids=torch.tensor(sets)).logits[:, :-1].log_softmax(-1)
    expected = logits.gather(-1, torch.tensor(sets)[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs_of(policy, sets), expected, rtol=0, atol=1e-12)


def test_the_trainers_rounding_is_what_a_finer_copy_of_the_model_says():
    policy = tiny_policy(dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in policy.module.state_dict().items()}
    sets = sample_ids(policy, num_sets=2, num_tokens=16, seed=0)
    found = own_noise(policy, sets)
    for name, value in policy.module.state_dict().items():
        assert value.dtype is before[name].dtype
        assert torch.equal(value, before[name])
    finer = tiny_policy(dtype=torch.float32)
    finer.module.load_state_dict(before)
    gap = (logprobs_of(policy, sets) - logprobs_of(finer, sets)).abs().mean()
    assert found == pytest.approx(float(gap), rel=0.05)  # here only, rotations are rounded, too
    assert found > 1e-4
    assert own_noise(tiny_policy(dtype=torch.float64), sets) == 0.0
    assert own_noise(tiny_policy(dtype=torch.float32), sets) < 1e-5


def test_a_model_without_a_finer_forward_has_the_least_limits_and_this_is_said(caplog):
    policy = tiny_policy(dtype=torch.bfloat16)

    def refuse(_module, arguments, output):
        if arguments[0].dtype is torch.float32:
            raise RuntimeError("only bfloat16")

    policy.module.get_output_embeddings().register_forward_hook(refuse)
    assert measure_noise(policy, sample_ids(policy, num_sets=2, num_tokens=8, seed=0)) == 0.0
    assert "weights.probe_tolerance is its least value: only bfloat16" in caplog.text


def test_the_limits_grow_with_the_rounding_and_a_set_tolerance_stays():
    section = WeightsSection()
    assert section.probe_limits(DType.bfloat16, 0.01) == PROBE_LIMITS[DType.bfloat16]
    noisy = section.probe_limits(DType.bfloat16, 0.2)
    assert (noisy.mean, noisy.largest) == pytest.approx((0.5, 5.0))
    strict = section.probe_limits(DType.float32, 4e-6)
    assert (strict.mean, strict.largest) == (1e-3, 1e-3)
    chosen = WeightsSection(probe_tolerance=0.02).probe_limits(DType.float32, 1.0)
    assert (chosen.mean, chosen.largest) == pytest.approx((0.02, 0.2))


def test_a_run_announces_both_sets_with_the_limits():
    weights = PolicyWeights(tiny_policy(dtype=torch.float32), WeightsSection(), seed=0)
    probe = weights.probe()
    assert (probe.tolerance, probe.max_tolerance) == (1e-3, 1e-3)
    assert len(probe.sets) == 2
    assert all(len(ids.token_ids) == len(ids.logprobs) + 1 for ids in probe.sets)
    assert all(math.isfinite(value) for ids in probe.sets for value in ids.logprobs)
