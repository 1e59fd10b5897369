"""The embedded engine's model computes what the trainer's does."""

from pathlib import Path

import pytest
import torch

from async_grpo.config.policy import DType, PolicySection
from async_grpo.config.run import RunSection
from async_grpo.config.schema import Config
from async_grpo.config.task import TaskSection
from async_grpo.config.trainer import TrainerSection
from async_grpo.engine.model import load_model
from async_grpo.training.model import load_policy
from tests.fakes.tiny_policy import tiny_module


@pytest.mark.parametrize("fp32_head", [True, False])
def test_logits_of_a_bfloat16_engine_are_the_trainers(tmp_path: Path, fp32_head: bool) -> None:
    tiny_module(dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    config = Config(
        run=RunSection(output_dir=str(tmp_path), num_train_steps=1),
        policy=PolicySection(model=str(tmp_path / "model"), dtype=DType.bfloat16),
        task=TaskSection(name="reverse"),
        trainer=TrainerSection(fp32_head=fp32_head),
    )
    ids = torch.arange(9)[None]
    engine = load_model(config).module(input_ids=ids).logits
    policy = load_policy(config.policy, config.trainer, torch.device("cpu"), trainable=False)
    assert engine.dtype is (torch.float32 if fp32_head else torch.bfloat16)
    assert torch.equal(engine, policy.module(input_ids=ids).logits)
