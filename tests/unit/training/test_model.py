from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from async_grpo.config.policy import DType, PolicySection
from async_grpo.config.trainer import TrainerSection
from async_grpo.config.weights import WeightsSection
from async_grpo.errors import AsyncGrpoError, ConfigError
from async_grpo.training.model import PolicyModel, load_policy, save_policy
from async_grpo.training.self_test import check_model
from async_grpo.training.weight_source import PolicyWeights
from tests.fakes.tiny_policy import tiny_module, tiny_policy

CPU = torch.device("cpu")
SETTINGS = TrainerSection(logprob_chunk_tokens=8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sound_model_passes_the_self_tests(dtype):
    check_model(tiny_policy(dtype=dtype))


class Leaking(PolicyModel):
    """Ignores the positions, as a model does that keeps a cache or is given a mask."""

    def hidden_states(self, input_ids, position_ids):
        positions = torch.arange(input_ids.shape[1])[None]
        return super().hidden_states(input_ids, positions)


def test_packed_sequences_that_see_each_other_are_refused():
    with pytest.raises(ConfigError, match="packed sequences see each other"):
        check_model(Leaking(tiny_module(), chunk_tokens=4))


class Scaling(torch.nn.Module):
    """A head whose logits are more than linear in the hidden states."""

    def __init__(self, module):
        super().__init__()
        self.base_model = module.base_model
        self.module, self.config, self.dtype, self.device = (
            module, module.config, module.dtype, module.device,
        )  # fmt: skip

    def get_output_embeddings(self):
        return self.module.get_output_embeddings()

    def forward(self, **kwargs):
        logits = self.module(**kwargs).logits
        return SimpleNamespace(logits=5.0 * torch.tanh(logits / 5.0))


def test_a_head_that_does_more_than_a_linear_map_is_refused():
    with pytest.raises(ConfigError, match="more than a linear map"):
        check_model(PolicyModel(Scaling(tiny_module()), chunk_tokens=4))


def test_save_and_load_round_trip(tmp_path):
    source = tmp_path / "source"
    tiny_module(dtype=torch.float32).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    section = PolicySection(model=str(source), dtype=DType.float32)
    policy = load_policy(section, SETTINGS, CPU)
    assert not policy.module.training
    assert policy.module.config.use_cache is False
    with torch.no_grad():
        policy.module.get_input_embeddings().weight.add_(1.0)
    for _ in range(2):  # the second replaces the first
        save_policy(policy, str(source), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, policy.module.lm_head.weight)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_full_disk_is_told_and_not_filled_further(tmp_path):
    def no_room(directory):
        (directory / "config.json").write_text("{}")
        raise SafetensorError("I/O error: No space left on device")

    module = tiny_module()
    module.save_pretrained = no_room
    with pytest.raises(AsyncGrpoError, match="out cannot be written: I/O error: No space left"):
        save_policy(PolicyModel(module, chunk_tokens=4), str(tmp_path), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_dropout_is_switched_off(tmp_path):
    tiny_module(dtype=torch.float32, attention_dropout=0.5).save_pretrained(tmp_path)
    section = PolicySection(model=str(tmp_path))
    policy = load_policy(section, SETTINGS, CPU)
    ids = torch.arange(5)[None]
    one, other = (policy.hidden_states(ids, ids) for _ in range(2))
    assert torch.equal(one, other)


def test_a_frozen_policy_needs_no_gradient(tmp_path):
    tiny_module(dtype=torch.float32).save_pretrained(tmp_path)
    policy = load_policy(PolicySection(model=str(tmp_path)), SETTINGS, CPU, trainable=False)
    assert not any(parameter.requires_grad for parameter in policy.module.parameters())


def test_what_cannot_be_loaded_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"policy\.model: cannot load"):
        load_policy(PolicySection(model=str(tmp_path)), SETTINGS, CPU)


def test_weights_are_named_once_and_the_probe_follows_them():
    policy = tiny_policy(dtype=torch.float32)
    weights = PolicyWeights(policy, WeightsSection(), seed=1)
    names = [name for name, _ in weights.named_tensors()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names  # tied
    assert names == [name for name, _ in policy.module.named_parameters()]
    before = weights.probe().sets[1]
    logits = policy.module(input_ids=torch.tensor([before.token_ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(before.token_ids[1:])[:, None])
    torch.testing.assert_close(
        torch.tensor(before.logprobs), expected.detach().squeeze(-1), rtol=0, atol=1e-5
    )
    with torch.no_grad():
        policy.module.model.norm.weight.mul_(2.0)
    after = weights.probe().sets[1]
    assert after.token_ids == before.token_ids
    assert max(abs(a - b) for a, b in zip(after.logprobs, before.logprobs, strict=True)) > 0.1
