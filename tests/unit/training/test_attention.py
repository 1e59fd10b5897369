"""Implementations of attention: the same log-probs of packed sequences, or a refusal."""

import pytest
import torch
from transformers.utils.import_utils import is_flash_attn_2_available

from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.policy import PolicySection
from async_grpo.config.trainer import Attention, TrainerSection
from async_grpo.errors import ConfigError
from async_grpo.training.model import load_policy
from async_grpo.training.step import TrainStep
from tests.fakes.tiny_policy import random_groups, tiny_module

CPU = torch.device("cpu")


@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": True, "sliding_window": 4}])
def test_packed_log_probs_and_gradients_are_the_same_by_each_implementation(tmp_path, changes):
    tiny_module(dtype=torch.float32, **changes).save_pretrained(tmp_path)
    found = []
    for attention in (Attention.sdpa, Attention.eager):
        settings = TrainerSection(attention=attention, tokens_per_microbatch=64)
        policy = load_policy(PolicySection(model=str(tmp_path)), settings, CPU)
        assert policy.module.config._attn_implementation == attention.value
        step = TrainStep(policy, AlgorithmSection(), settings, num_train_steps=3)
        outcome = step.apply(random_groups(4, version=1), 1)
        found.append((outcome.tokens.policy_logprobs, outcome.grad_norms[0]))
    (one, norm), (other, other_norm) = found
    assert not torch.equal(one, one[0].expand_as(one))
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    assert norm == pytest.approx(other_norm, rel=1e-4)


@pytest.mark.skipif(is_flash_attn_2_available(), reason="flash-attn is installed")
def test_a_package_that_is_not_installed_is_named(tmp_path):
    settings = TrainerSection(attention=Attention.flash_attention_2)
    with pytest.raises(ConfigError, match=r"trainer\.attention=flash_attention_2 needs .* flash-a"):
        load_policy(PolicySection(model=str(tmp_path)), settings, CPU)


def test_an_implementation_without_a_backward_pass_on_the_cpu_is_refused_there(tmp_path):
    settings = TrainerSection(attention=Attention.flex_attention)
    with pytest.raises(ConfigError, match=r"flex_attention needs a CUDA device, and .* is cpu"):
        load_policy(PolicySection(model=str(tmp_path)), settings, CPU)
