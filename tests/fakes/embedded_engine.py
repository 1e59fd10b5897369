"""The embedded engine over a tiny model of random weights, made in its process.

Served by `engine_process`.
"""

import functools
import logging
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from async_grpo.config.engine import EngineSection
from async_grpo.config.policy import DType, PolicySection
from async_grpo.config.run import RunSection
from async_grpo.config.schema import Config
from async_grpo.config.task import TaskSection
from async_grpo.config.weights import WeightsSection
from async_grpo.engine.admission import Limits
from async_grpo.engine.embedded import EmbeddedEngine
from async_grpo.engine.model import LoadedModel
from tests.fakes.engine_process import ServedEngine, preload
from tests.fakes.fake_engine import EOS
from tests.fakes.tiny_policy import VOCAB, tiny_module

BUCKET_BYTES = 6_400_000
"""Two buckets, a layer each, more than sockets hold (4 MB on Linux): a broadcast cannot end before
it is received."""
_CONTEXT_LENGTH = 128
_CHECKPOINT = -1
preload("tests.fakes.embedded_engine")


@functools.cache
def model_of(version: int) -> Qwen3ForCausalLM:
    """13 MB of float32 that nobody may change; another model for each version."""
    module = tiny_module(
        dtype=torch.float32, seed=version + 1, hidden_size=64, intermediate_size=8192,
        max_position_embeddings=_CONTEXT_LENGTH,
    )  # fmt: skip
    return module.eval().requires_grad_(False)


def embedded_engine(directory: Path, *, timeout_s: float) -> ServedEngine:
    """For `EngineProcess.start`; as `async-grpo engine` makes one, but for the files."""
    torch.set_num_threads(1)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    config = Config(
        run=RunSection(output_dir=str(directory), num_train_steps=1),
        policy=PolicySection(model="none", dtype=DType.float32),
        task=TaskSection(name="reverse"),
        engine=EngineSection(max_running_requests=8),
        weights=WeightsSection(timeout_s=timeout_s),
    )
    model = LoadedModel(
        module=model_of(_CHECKPOINT),
        path="random",
        limits=Limits(vocab_size=VOCAB, context_length=_CONTEXT_LENGTH),
        eos_token_ids=(EOS,),
        device=torch.device("cpu"),
    )
    engine = EmbeddedEngine(config, model)
    engine.start()
    return ServedEngine(engine, engine._loader, engine.died)
