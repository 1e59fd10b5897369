"""A resumed trainer computes what an uninterrupted one does, bit for bit; misfits are named."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.trainer import LRSchedule, TrainerSection
from async_grpo.config.weights import WeightsSection
from async_grpo.errors import ConfigError
from async_grpo.training.checkpoint import (
    MODEL,
    OPTIMIZER,
    RNG,
    STATE,
    Capture,
    CheckpointState,
    LedgerPosition,
    Schedule,
    load_checkpoint,
    read_state,
    require_same_config,
)
from async_grpo.training.model import PolicyModel
from async_grpo.training.step import TrainStep
from async_grpo.training.weight_source import PolicyWeights
from async_grpo.types import WeightsName
from tests.fakes.tiny_moe import tiny_moe
from tests.fakes.tiny_policy import random_groups, tiny_module

NUM_STEPS = 6
SETTINGS = TrainerSection(
    lr=1e-2, lr_schedule=LRSchedule.cosine, warmup_steps=3, updates_per_step=2, weight_decay=0.1
)


class Trainer:
    """A policy, its step, and everything that was computed with them."""

    def __init__(self, *, dtype=torch.float32, seed=0, module=None, **changes):
        module = module or tiny_module(dtype=dtype, seed=seed, **changes)
        self.policy = PolicyModel(module, chunk_tokens=7)
        self.step = TrainStep(self.policy, AlgorithmSection(), SETTINGS, num_train_steps=NUM_STEPS)
        self.weights = PolicyWeights(self.policy, WeightsSection(), seed=0)
        self.history: list[tuple] = []

    def train(self, first, last):
        for version in range(first, last):
            outcome = self.step.apply(random_groups(4, seed=version), version)
            # Something in a step may draw numbers: it must draw the same ones.
            drawn = (float(torch.rand(())), float(np.random.random()))  # noqa: NPY002 -- global
            self.history.append((outcome.losses, outcome.grad_norms, outcome.lr, drawn))

    def tensors(self):
        named = {name: tensor.clone() for name, tensor in self.weights.named_tensors()}
        return named | {k: v.clone() for k, v in self.step.optimizer.tensors().items()}


def state(version, config=None):
    return CheckpointState(
        incarnation=1,
        policy_version=version,
        schedule=Schedule(num_updates_done=2 * version, lr=0.5),
        ledger=LedgerPosition(incarnation=1, step=version - 1, draw_number=version + 3),
        config=config or {"trainer.lr": 0.01},
    )


def save_checkpoint(path, state, weights, step):
    """As `checkpoint_files` does, but without hashes."""
    for name, pieces in Capture(weights, step).take(state).items():
        (path / name).write_bytes(b"".join(pieces))


def seed_all():
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002 -- global


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def straight(request):
    seed_all()
    trainer = Trainer(dtype=request.param)
    trainer.train(0, NUM_STEPS)
    return request.param, trainer


@pytest.mark.parametrize("stop", range(1, NUM_STEPS))
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(straight, stop, tmp_path):
    dtype, expected = straight
    seed_all()
    before = Trainer(dtype=dtype)
    before.train(0, stop)
    save_checkpoint(tmp_path, state(stop), before.weights, before.step)

    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002 -- global
    after = Trainer(dtype=dtype, seed=1)
    load_checkpoint(tmp_path, after.weights, after.step)
    after.train(stop, NUM_STEPS)

    assert before.history + after.history == expected.history
    found, wanted = after.tensors(), expected.tensors()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_a_low_precision_policy_keeps_its_float32_masters(tmp_path):
    trainer = Trainer(dtype=torch.bfloat16)
    trainer.train(0, 1)
    save_checkpoint(tmp_path, state(1), trainer.weights, trainer.step)
    saved = load_file(tmp_path / OPTIMIZER)
    name = next(iter(trainer.policy.module.named_parameters()))[0]
    assert saved[f"{name}:master"].dtype is torch.float32
    assert load_file(tmp_path / MODEL)[name].dtype is torch.bfloat16


def test_the_model_file_has_the_names_of_hugging_face(tmp_path):
    trainer = Trainer()
    trainer.train(0, 1)
    save_checkpoint(tmp_path, state(1), trainer.weights, trainer.step)
    with safe_open(tmp_path / MODEL, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    other = tiny_module(dtype=torch.float32, seed=8)
    missing, unexpected = other.load_state_dict(load_file(tmp_path / MODEL), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied: saved once


def test_what_is_captured_stays_as_it_was_while_training_goes_on(tmp_path):
    trainer = Trainer()
    trainer.train(0, 1)
    expected = trainer.tensors()
    files = Capture(trainer.weights, trainer.step).take(state(1))
    trainer.train(1, 3)
    assert not all(torch.equal(expected[k], v) for k, v in trainer.tensors().items())
    for name, pieces in files.items():
        (tmp_path / name).write_bytes(b"".join(pieces))
    found = load_file(tmp_path / MODEL) | load_file(tmp_path / OPTIMIZER)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_optimizer_before_its_first_update_is_an_empty_file(tmp_path):
    trainer, other = Trainer(), Trainer(seed=1)
    save_checkpoint(tmp_path, state(1), trainer.weights, trainer.step)
    assert load_file(tmp_path / OPTIMIZER) == {}
    load_checkpoint(tmp_path, other.weights, other.step)
    assert other.step.optimizer.tensors() == {}


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_a_checkpoint_of_experts_is_one_of_transformers(kind, tmp_path):
    """It has their names in files, so any loader takes it, and it restores the fused tensors."""
    module = tiny_moe(kind, dtype=torch.bfloat16)
    trainer = Trainer(module=module)
    module.save_pretrained(tmp_path / "hf")
    (tmp_path / "ours").mkdir()
    save_checkpoint(tmp_path / "ours", state(1), trainer.weights, trainer.step)
    theirs, ours = (load_file(tmp_path / where / MODEL) for where in ("hf", "ours"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    other = Trainer(module=tiny_moe(kind, seed=1, dtype=torch.bfloat16))
    load_checkpoint(tmp_path / "ours", other.weights, other.step)
    for name, tensor in module.state_dict().items():
        assert torch.equal(other.policy.module.state_dict()[name], tensor), name


def test_state_tells_what_the_checkpoint_is(tmp_path):
    trainer = Trainer()
    trainer.train(0, 2)
    save_checkpoint(tmp_path, state(2), trainer.weights, trainer.step)
    found = read_state(tmp_path)
    assert found == state(2)
    assert found.name == WeightsName(1, 2)
    plain = json.loads((tmp_path / STATE).read_bytes())
    assert plain["state"]["ledger"] == {"incarnation": 1, "step": 1, "draw_number": 5}


def test_another_configuration_is_refused_with_a_diff(tmp_path):
    kept = {"trainer.lr": 0.01, "run.seed": 0}
    require_same_config(tmp_path, state(1, kept), kept)
    with pytest.raises(ConfigError) as caught:
        require_same_config(tmp_path, state(1, kept), {"trainer.lr": 0.5, "run.seed": 1})
    assert caught.value.problems == [
        f"checkpoint {tmp_path}: run.seed: the run has 0, now it is 1",
        f"checkpoint {tmp_path}: trainer.lr: the run has 0.01, now it is 0.5",
    ]


def change(path, **tensors):
    """Rewrite a file; None removes a tensor."""
    content = load_file(path)
    for name, tensor in tensors.items():
        key = next(k for k in content if k.endswith(name.replace("__", ".")))
        del content[key]
        if tensor is not None:
            content[key] = tensor
    save_file(content, path)


@pytest.mark.parametrize(
    ("file", "name", "tensor"),
    [
        (MODEL, "norm__weight", None),
        (MODEL, "norm__weight", torch.ones(3)),
        (MODEL, "norm__weight", torch.ones(16, dtype=torch.float64)),
        (OPTIMIZER, "norm__weight:exp_avg", None),
        (OPTIMIZER, "norm__weight:exp_avg", torch.ones(3)),
        (RNG, "numpy__mt19937", None),
    ],
)
def test_tensors_that_do_not_fit_are_refused(file, name, tensor, tmp_path):
    trainer = Trainer()
    trainer.train(0, 1)
    save_checkpoint(tmp_path, state(1), trainer.weights, trainer.step)
    change(tmp_path / file, **{name: tensor})
    other = Trainer()
    with pytest.raises(ConfigError, match="does not fit this model"):
        load_checkpoint(tmp_path, other.weights, other.step)


def test_tensors_of_another_model_are_refused(tmp_path):
    trainer = Trainer()
    trainer.train(0, 1)
    save_checkpoint(tmp_path, state(1), trainer.weights, trainer.step)
    larger = Trainer(num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"other tensors: .*layers\.2"):
        load_checkpoint(tmp_path, larger.weights, larger.step)


def test_a_state_of_another_format_is_refused(tmp_path: Path):
    trainer = Trainer()
    trainer.train(0, 1)
    save_checkpoint(tmp_path, state(1), trainer.weights, trainer.step)
    written = json.loads((tmp_path / STATE).read_text())
    for other in ({"format_version": 1, "surprise": 3}, written | {"format_version": 2}):
        (tmp_path / STATE).write_text(json.dumps(other))
        with pytest.raises(ConfigError, match="not of checkpoint format 1"):
            read_state(tmp_path)
