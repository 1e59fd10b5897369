"""The memory that `check` prints, against bytes that models of several shapes really hold."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from async_grpo.config.load import load_config
from async_grpo.config.policy import DType
from async_grpo.config.schema import Config
from async_grpo.config.trainer import TrainerSection
from async_grpo.launch.check import describe
from async_grpo.launch.memory import (
    activation_bytes,
    engine_terms,
    memory_problems,
    state_bytes,
    trainer_terms,
)
from async_grpo.training.model import PolicyModel
from async_grpo.training.optimizer import PolicyOptimizer
from async_grpo.weights.model_facts import ModelFacts, text_config
from tests.fakes.saved_bytes import SavedBytes

SHAPES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
DTYPES = {DType.bfloat16: torch.bfloat16, DType.float32: torch.float32}
QWEN3_17B = {
    "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960,
}  # fmt: skip
GIB = 2**30


@pytest.fixture
def config(tmp_path) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(
        "run: {output_dir: out, num_train_steps: 1}\npolicy: {model: m, dtype: bfloat16}\n"
        "task: {name: reverse}\nreplay: {address: 'tcp://127.0.0.1:0'}\n"
    )
    return load_config(path)


def model_of(shape: str, dtype: DType):
    make, build = SHAPES[shape]
    settings = make(
        vocab_size=101, hidden_size=128, intermediate_size=320, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=16, max_position_embeddings=1024,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return build(settings).to(DTYPES[dtype]).eval()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "single"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed_again"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_those_that_autograd_keeps(config, shape, dtype, again, packed):
    module = model_of(shape, dtype)
    policy = PolicyModel(module, chunk_tokens=64)
    if again:
        policy.checkpoint_layers()
    halves = torch.arange(64).repeat(2)
    positions = halves.expand(2, -1) if packed else torch.arange(128)[None]
    with SavedBytes(module) as saved:
        policy.hidden_states(torch.zeros_like(positions), positions)
    facts = text_config(module.config.to_dict())

    def estimate(*, again: bool) -> int:
        changed = replace(
            config,
            policy=replace(config.policy, dtype=dtype),
            trainer=TrainerSection(gradient_checkpointing=again),
        )
        return activation_bytes(changed, facts, positions.numel(), 128)

    expected = estimate(again=again)
    if again:  # one layer is computed again later, in the backward pass
        expected -= estimate(again=False) // 4
    assert expected == pytest.approx(saved.total, rel=0.1)
    if not again:
        assert expected == saved.total


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_is_what_an_update_holds(dtype):
    module = model_of("qwen3", dtype)
    optimizer = PolicyOptimizer(module.named_parameters(), TrainerSection())
    ids = torch.zeros(1, 4, dtype=torch.long)
    module(input_ids=ids).logits.float().sum().backward()
    optimizer.step(1e-3)
    held: dict[int, int] = {}
    masters = [master for _, master in optimizer._pairs] or list(module.parameters())
    gradients = [master.grad for master in masters if master.grad is not None]
    state = [t for t in optimizer.tensors().values() if t.ndim]  # not the step counters
    for tensor in [*module.parameters(), *masters, *gradients, *state]:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    num_parameters = sum(p.numel() for p in module.parameters())
    assert state_bytes(dtype, num_parameters) == pytest.approx(sum(held.values()), rel=0.001)


def test_a_policy_in_bfloat16_takes_18_bytes_a_parameter_and_not_8(config):
    facts = ModelFacts(1_720_574_976, QWEN3_17B)
    terms = {term.name: term.num_bytes for term in trainer_terms(config, facts)}
    assert terms["state"] == pytest.approx(28.8 * GIB, rel=0.01)
    assert terms["snapshot"] == pytest.approx(3.2 * GIB, rel=0.01)


def test_a_trainer_that_needs_more_than_there_is_is_refused(config):
    facts = ModelFacts(1_720_574_976, QWEN3_17B)
    config.engine.context_length = 20480
    config.engine.kv_cache_bytes = 8 * GIB
    config.trainer.memory_bytes = 80 * GIB
    (problem,) = memory_problems(config, facts)
    assert problem.startswith("trainer.memory_bytes (80 GiB) is below the ")
    assert "activations" in problem
    config.trainer.gradient_checkpointing = True
    assert list(memory_problems(config, facts)) == []


def test_the_embedded_engines_cache_is_what_its_limit_holds(config):
    facts = ModelFacts(1_720_574_976, QWEN3_17B)
    cache = {term.name: term for term in engine_terms(config, facts)}["KV cache"]
    assert cache.num_bytes <= config.engine.kv_cache_bytes
    config.engine.context_length = 40960
    (problem,) = memory_problems(config, facts)
    assert problem.startswith("engine.kv_cache_bytes (1073741824) must hold one sequence of 40960")


def test_check_prints_the_terms_of_both_sides(config, tmp_path):
    module = model_of("qwen3", DType.float32)
    module.save_pretrained(tmp_path / "m")
    config.policy.model = str(tmp_path / "m")
    printed = describe(config)
    for line in ("# trainer: state", "# trainer: activations", "# trainer: head",
                 "# trainer memory", "# engine: KV cache", "# engine memory"):  # fmt: skip
        assert line in printed
