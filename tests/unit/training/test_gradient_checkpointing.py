"""Layers computed again in the backward pass: same numbers, a fraction of what is kept."""

import pytest
import torch
from torch import nn

from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.policy import DType, PolicySection
from async_grpo.config.trainer import TrainerSection
from async_grpo.errors import ConfigError
from async_grpo.training.model import PolicyModel, load_policy
from async_grpo.training.step import TrainStep
from tests.fakes.saved_bytes import SavedBytes
from tests.fakes.tiny_policy import random_groups, tiny_module

CPU = torch.device("cpu")


def policy_of(*, again: bool, dtype: torch.dtype = torch.float64, **changes) -> PolicyModel:
    policy = PolicyModel(tiny_module(dtype=dtype, **changes), chunk_tokens=7)
    if again:
        policy.checkpoint_layers()
    return policy


def packed(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions of two sequences in one row."""
    torch.manual_seed(0)
    half = torch.arange(num_tokens // 2)
    return torch.randint(0, 19, (1, 2 * len(half))), torch.cat([half, half])[None]


def test_gradients_are_those_without_it_to_the_last_bit():
    gradients = []
    for again in (False, True):
        policy = policy_of(again=again)
        settings = TrainerSection(tokens_per_microbatch=30, max_grad_norm=1e9)
        step = TrainStep(policy, AlgorithmSection(), settings, num_train_steps=3)
        step.apply(random_groups(5, version=1), 1)
        state = step.optimizer._adamw.state
        gradients.append([state[p]["exp_avg"] for p in policy.module.parameters()])
    assert max(gradient.abs().max() for gradient in gradients[0]) > 1e-6
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_least_80_percent_fewer_bytes_are_kept_for_the_backward_pass(dtype):
    kept = []
    for again in (False, True):
        policy = policy_of(again=again, dtype=dtype, hidden_size=64, intermediate_size=192)
        with SavedBytes(policy.module) as saved:
            policy.hidden_states(*packed(256))
        kept.append(saved.total)
    assert kept[1] < 0.2 * kept[0]


def test_scoring_without_gradients_keeps_nothing_and_changes_nothing():
    outputs = []
    for again in (False, True):
        policy = policy_of(again=again)
        with SavedBytes(policy.module) as saved, torch.no_grad():
            outputs.append(policy.hidden_states(*packed(32)))
        assert saved.total == 0
    assert torch.equal(*outputs)


def test_the_field_reaches_the_trained_policy_and_not_the_frozen_one(tmp_path):
    tiny_module(dtype=torch.float32, hidden_size=64).save_pretrained(tmp_path)
    section = PolicySection(model=str(tmp_path), dtype=DType.float32)
    kept = {}
    for again in (False, True):
        policy = load_policy(section, TrainerSection(gradient_checkpointing=again), CPU)
        with SavedBytes(policy.module) as saved:
            policy.hidden_states(*packed(64))
        kept[again] = saved.total
    assert kept[True] < 0.2 * kept[False]
    settings = TrainerSection(gradient_checkpointing=True)
    frozen = load_policy(section, settings, CPU, trainable=False)
    with SavedBytes(frozen.module) as saved:
        frozen.hidden_states(*packed(64))
    assert saved.total == 0


def test_a_model_without_layers_of_transformers_is_refused():
    policy = policy_of(again=False)
    policy._backbone = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"trainer\.gradient_checkpointing: Qwen3ForCausalLM has"):
        policy.checkpoint_layers()
