"""Both ends of weight sync see the tensors of a saved checkpoint, as views of the model's own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Interleave, WeightConverter

from async_grpo.config.weights import WeightsSection
from async_grpo.engine.admission import RequestRefused
from async_grpo.engine.weight_loader import WeightLoader
from async_grpo.errors import ConfigError
from async_grpo.training.model import PolicyModel
from async_grpo.training.weight_source import PolicyWeights
from async_grpo.weights.flatten import dtype_name, empty_buckets, flatten
from async_grpo.weights.plan import TensorSpec, make_plan
from async_grpo.weights.tensor_list import known_tensors, travelling_tensors
from tests.fakes.tiny_moe import BUFFER, KINDS, tiny_moe
from tests.fakes.tiny_policy import tiny_module

CPU = torch.device("cpu")
EXPERT = "model.layers.1.mlp.experts.3.{}.weight"


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_values_are_those_of_a_saved_checkpoint(kind, tmp_path):
    module = tiny_moe(kind)
    module.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = travelling_tensors(module)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_experts_travel_one_by_one_without_a_copy():
    module = tiny_moe("qwen3_moe")
    found = travelling_tensors(module)
    fused = module.model.layers[1].mlp.experts
    with torch.no_grad():
        fused.gate_up_proj[3].fill_(1.0)
        fused.down_proj[3].fill_(2.0)
    assert found[EXPERT.format("up_proj")].unique().tolist() == [1.0]
    assert found[EXPERT.format("down_proj")].unique().tolist() == [2.0]
    found[EXPERT.format("gate_proj")].fill_(3.0)
    assert fused.gate_up_proj[3, :16].unique().tolist() == [3.0]
    assert fused.gate_up_proj[3, 16:].unique().tolist() == [1.0]
    storages = {tensor.untyped_storage().data_ptr() for tensor in module.state_dict().values()}
    assert all(t.untyped_storage().data_ptr() in storages for t in found.values())
    assert all(t.is_contiguous() for t in found.values())  # else a bucket would copy twice


def test_a_dense_model_travels_in_its_own_order_and_names():
    module = tiny_module()
    own = [name for name, _ in module.named_parameters()]
    assert list(travelling_tensors(module)) == own
    assert list(known_tensors(module)) == [*own, "lm_head.weight"]  # tied


def test_a_bfloat16_model_sends_its_float32_tensors_as_they_are():
    """The correction buffer, and the router's weight, which is a parameter."""
    module = tiny_moe("glm4_moe", dtype=torch.bfloat16)
    tensors = travelling_tensors(module)
    specs = [TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()]
    plan = make_plan(specs, 1 << 30)
    (bucket,) = plan.buckets
    router = BUFFER.replace("e_score_correction_bias", "weight")
    assert [(t.name, t.dtype) for t in bucket[:2]] == [(BUFFER, "float32"), (router, "float32")]
    assert {t.dtype for t in bucket[2:]} == {"bfloat16"}
    (payload,) = empty_buckets(plan, CPU)
    flatten(bucket, tensors, payload)
    assert torch.equal(payload[: bucket[0].num_bytes].view(torch.float32), tensors[BUFFER])


def test_a_model_saved_in_another_arrangement_is_refused():
    """Interleaved halves are no slice of anything: sending them would need a copy."""
    module = tiny_moe("qwen3_moe")
    module._weight_conversions = [
        WeightConverter("mlp.gate.weight", "mlp.gate.weight", [Interleave(dim=0)])
    ]
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM is saved in another arrangement"):
        travelling_tensors(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_loads_what_a_trainer_wrote(kind, dtype, tmp_path):
    sender = tiny_moe(kind, seed=1, dtype=dtype)
    weights = PolicyWeights(PolicyModel(sender, chunk_tokens=8), WeightsSection(), seed=0)
    save_file(dict(weights.named_tensors()), tmp_path / "model.safetensors")
    receiver = tiny_moe(kind, seed=2, dtype=dtype)
    loader = WeightLoader(receiver, CPU, 1.0)
    before = loader.checksums().total
    loader.load_directory(loader.open_directory(str(tmp_path)))
    for name, tensor in sender.state_dict().items():
        assert torch.equal(receiver.state_dict()[name], tensor), name
    assert loader.checksums().total == WeightLoader(sender, CPU, 1.0).checksums().total != before


def test_a_buffer_counts_as_a_weight(tmp_path: Path):
    """One that did not arrive is missed, and one that differs changes the checksum."""
    module = tiny_moe("glm4_moe")
    loader = WeightLoader(module, CPU, 1.0)
    before = loader.checksums().total
    tensors = {name: tensor.clone() for name, tensor in travelling_tensors(module).items()}
    with torch.no_grad():
        dict(module.named_buffers())[BUFFER].add_(1.0)
    assert loader.checksums().total != before
    del tensors[BUFFER]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RequestRefused, match=rf"{BUFFER} is missing"):
        loader.open_directory(str(tmp_path))


def test_a_buffer_that_is_computed_is_passed_over(tmp_path: Path):
    module = tiny_moe("qwen3_moe")
    tensors = {name: tensor.clone() for name, tensor in travelling_tensors(module).items()}
    inverse = module.model.rotary_emb.inv_freq.clone()
    save_file(
        tensors | {"model.rotary_emb.inv_freq": torch.zeros(99)}, tmp_path / "model.safetensors"
    )
    loader = WeightLoader(module, CPU, 1.0)
    loader.load_directory(loader.open_directory(str(tmp_path)))
    assert torch.equal(module.model.rotary_emb.inv_freq, inverse)
