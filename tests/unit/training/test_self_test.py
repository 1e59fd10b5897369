"""Models that are random in training mode, or whose positions depend on what shares a row."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.policy import PolicySection
from async_grpo.config.trainer import TrainerSection
from async_grpo.doctor.model_checks import check_model as examine
from async_grpo.doctor.report import Verdict
from async_grpo.errors import ConfigError
from async_grpo.training.model import PolicyModel, load_policy
from async_grpo.training.self_test import check_model, neighbor_gap, neighbor_tokens
from async_grpo.training.step import TrainStep
from tests.fakes.tiny_policy import VOCAB, random_groups

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1,
    "max_position_embeddings": 128, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
NOISY = [
    ("phimoe", EXPERTS),
    ("mixtral", EXPERTS | {"router_jitter_noise": 0.1}),
    ("seed_oss", {"residual_dropout": 0.1}),
    ("qwen3", {"attention_dropout": 0.5}),
]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4, "original_max_position_embeddings": 16,
}  # fmt: skip
UNSTEADY = [
    ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}, 16),
    (
        "llama",
        {
            "max_position_embeddings": 20,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
        20,
    ),
]


def module_of(kind: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SMALL | changes))
    module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return module


@pytest.mark.parametrize(("kind", "changes"), NOISY)
def test_noise_of_the_training_mode_is_refused_by_its_name(kind: str, changes: Any) -> None:
    policy = PolicyModel(module_of(kind, changes).train(), chunk_tokens=8)
    with pytest.raises(ConfigError, match=r"scored twice differ .* draws random numbers"):
        check_model(policy)
    verdicts = {f.check: f.verdict for f in examine(policy, seed=0, context_length=0)}
    assert verdicts["repeatable"] is Verdict.FAIL


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(("kind", "changes"), NOISY)
def test_the_trainer_draws_no_random_number_from_such_models(
    tmp_path: Path, kind: str, changes: Any, again: bool
) -> None:
    module_of(kind, changes).save_pretrained(tmp_path)
    settings = TrainerSection(gradient_checkpointing=again)
    policy = load_policy(PolicySection(model=str(tmp_path)), settings, CPU)
    check_model(policy)
    step = TrainStep(policy, AlgorithmSection(), settings, num_train_steps=1)
    before = torch.get_rng_state()
    step.apply(random_groups(3), 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("kind", "changes", "border"), UNSTEADY)
def test_a_long_neighbor_that_turns_positions_is_noticed(
    kind: str, changes: Any, border: int
) -> None:
    policy = PolicyModel(module_of(kind, changes).eval(), chunk_tokens=8)
    assert neighbor_gap(policy, border) < 1e-5
    assert neighbor_gap(policy, border + 1) > 1e-3
    assert neighbor_tokens(policy, 128) >= border + 1
    with pytest.raises(ConfigError, match=r"change by .* beside one of 48 tokens"):
        check_model(policy, context_length=128)
    findings = {f.check: f for f in examine(policy, seed=0, context_length=border + 1)}
    assert findings["neighbors"].verdict is Verdict.FAIL
    assert f"to at most {border}" in findings["neighbors"].figure


def test_a_sequence_over_the_border_ends_the_step_and_not_the_numbers() -> None:
    kind, changes, _ = UNSTEADY[0]
    policy = PolicyModel(module_of(kind, changes).eval(), chunk_tokens=8)
    step = TrainStep(policy, AlgorithmSection(), TrainerSection(), num_train_steps=1)
    step.apply(random_groups(3, max_tokens=9), 0)
    with pytest.raises(ConfigError, match=r"beyond 16 the longrope positions .* at most 16"):
        step.apply(random_groups(8, max_tokens=30), 0)


def test_a_neighbor_longer_than_the_sliding_window_changes_nothing() -> None:
    changes = {"sliding_window": 50}
    policy = PolicyModel(module_of("mistral", changes).eval(), chunk_tokens=8)
    assert neighbor_tokens(policy, 64) == 51
    assert neighbor_tokens(policy, 50) == 48, "no sequence of the run is longer than the window"
    check_model(policy, context_length=64)


def test_a_model_that_does_not_name_what_is_below_its_head_is_refused() -> None:
    config = transformers.Llama4TextConfig(
        **SMALL, intermediate_size_mlp=64, num_local_experts=2, moe_layers=[]
    )
    module = transformers.Llama4ForCausalLM(config)
    with pytest.raises(ConfigError, match="Llama4ForCausalLM does not name the part below"):
        PolicyModel(module, chunk_tokens=8)
