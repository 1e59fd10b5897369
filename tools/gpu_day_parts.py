"""The parts of `gpu_day.py`: what each measures, and within how many seconds."""

import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_day_checks
import gpu_day_engine
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.policy import DType, PolicySection
from async_grpo.config.trainer import TrainerSection
from async_grpo.devices.choice import resolve_device, this_process
from async_grpo.training.model import PolicyModel, load_policy
from async_grpo.training.self_test import check_model, head_gap, packing_leak
from async_grpo.training.step import TrainStep
from async_grpo.training.toy import make_toy_tokenizer
from async_grpo.types import Completion, FinishReason, Rollout, RolloutGroup, Segment, WeightsName

PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
    "L40S": 362e12, "RTX 4090": 165e12, "L4": 121e12, "A10": 125e12,
}  # fmt: skip
"""Dense bfloat16 with float32 accumulation, by a part of the card's name, from NVIDIA's data
sheets. The first that fits counts."""
QWEN3_1_7B = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
QWEN3_0_6B = QWEN3_1_7B | {"hidden_size": 1024, "intermediate_size": 3072}
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
NUM_SEQUENCES = 4
"""Of one train step, each a micro-batch of its own."""
NUM_TIMED_STEPS = 2


@dataclass
class Settings:
    """What every part is told; plain values, since parts are processes."""

    directory: str
    cpu: bool
    engine_python: str = ""
    """empty: the embedded engine"""
    peak_flops: float = 0.0
    engine_url: str = ""
    limit_s: float = 0.0
    """of this part"""

    @property
    def device(self) -> torch.device:
        """Where the trainer computes."""
        return torch.device("cpu" if self.cpu else "cuda")

    @property
    def num_tokens(self) -> int:
        """Of one sequence."""
        return 256 if self.cpu else 8192

    @property
    def run_model(self) -> str:
        """The model of runs with an engine."""
        return f"{self.directory}/run_model"


@dataclass(frozen=True)
class Part:
    """One thing to measure."""

    run: Callable[[Settings], dict[str, Any]]
    limit_s: float
    needs_engine: bool = False


def has_card() -> bool:
    """Whether the trainer would compute on a CUDA device.

    Raises:
        ConfigError: there is a card, but torch cannot use it.
    """
    return bool(resolve_device("auto").type == "cuda")


def describe_machine(settings: Settings) -> str:
    """Where the figures come from. Makes the model of the runs, too, since it is quick."""
    _save_random(Path(settings.run_model), TINY if settings.cpu else QWEN3_0_6B, settings)
    if settings.cpu:
        cores = len(os.sched_getaffinity(0))
        return (
            f"a CPU ({platform.machine()}, {cores} cores), tiny shapes; torch {torch.__version__}"
        )
    return str(this_process())


def _save_random(directory: Path, shape: dict[str, int], settings: Settings) -> None:
    """A model of that shape with random weights and the quickstart's tokenizer."""
    tokenizer = make_toy_tokenizer()
    tokenizer.save_pretrained(directory)
    _random_model(shape | {"vocab_size": len(tokenizer)}, settings).save_pretrained(directory)


def _random_model(shape: dict[str, Any], settings: Settings) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape,
        max_position_embeddings=max(512, settings.num_tokens),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.device(settings.device):
        module: Any = Qwen3ForCausalLM(config)
    found: Qwen3ForCausalLM = module.to(torch.float32 if settings.cpu else torch.bfloat16)
    return found


def _policy(settings: Settings, *, gradient_checkpointing: bool = False) -> PolicyModel:
    """A random policy of 1.7 B parameters in bfloat16, loaded as the trainer loads it."""
    directory = Path(settings.directory) / "random_model"
    if not (directory / "config.json").exists():
        _random_model(TINY if settings.cpu else QWEN3_1_7B, settings).save_pretrained(directory)
    section = PolicySection(model=str(directory), dtype=DType.bfloat16)
    return load_policy(section, trainer_section(settings, gradient_checkpointing), settings.device)


def trainer_section(settings: Settings, gradient_checkpointing: bool) -> TrainerSection:
    """One sequence of `num_tokens` is one micro-batch."""
    return TrainerSection(
        tokens_per_microbatch=settings.num_tokens, gradient_checkpointing=gradient_checkpointing
    )


def self_test(settings: Settings) -> dict[str, Any]:
    """The trainer's own checks of a model in bfloat16."""
    model = _policy(settings)
    started = time.perf_counter()
    check_model(model)
    return {
        "packing_leak": packing_leak(model),
        "head_gap_nats": head_gap(model),
        "check_s": time.perf_counter() - started,
    }


def probe_noise(settings: Settings) -> dict[str, Any]:
    """What correct computations differ by on the probes of weight updates."""
    num_probes, num_tokens = (8, 17) if settings.cpu else (128, 133)
    return gpu_day_checks.probe_noise(
        _policy(settings), num_probes=num_probes, num_tokens=num_tokens
    )


def side_stream(settings: Settings) -> dict[str, Any]:
    """A broadcast of a bucket while the card trains."""
    return gpu_day_checks.side_stream(settings.device)


def step(settings: Settings, *, gradient_checkpointing: bool) -> dict[str, Any]:
    """Train steps of four sequences: time, peak memory, tokens per second, MFU."""
    model = _policy(settings, gradient_checkpointing=gradient_checkpointing)
    trainer = trainer_section(settings, gradient_checkpointing)
    train = TrainStep(model, AlgorithmSection(), trainer, num_train_steps=10)
    groups = [random_group(model.vocab_size, settings.num_tokens)]
    train.apply(groups, 0)  # allocations, kernels that are compiled or chosen
    if not settings.cpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    for version in range(1, 1 + NUM_TIMED_STEPS):
        outcome = train.apply(groups, version)
    if not settings.cpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / NUM_TIMED_STEPS
    per_second = NUM_SEQUENCES * settings.num_tokens / seconds
    figures = {
        "tokens_per_step": NUM_SEQUENCES * settings.num_tokens,
        "step_s": seconds,
        "tokens_per_s": per_second,
        **_peak_memory(settings),
        "loss": outcome.losses[0],
        "grad_norm": outcome.grad_norms[0],
        "model_tflops_per_s": per_second * flops_per_token(model, settings.num_tokens) / 1e12,
    }
    card = "" if settings.cpu else torch.cuda.get_device_name(0)
    if peak := settings.peak_flops or peak_of(card):
        figures["mfu"] = per_second * flops_per_token(model, settings.num_tokens) / peak
    return figures


def random_group(vocab_size: int, num_tokens: int) -> RolloutGroup:
    """One group of four rollouts of `num_tokens` tokens each, an eighth of them the prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocab_size, num_tokens // 8).astype(np.int32)
    length = num_tokens - len(prompt)
    rollouts = [
        Rollout(
            [
                Completion(
                    prompt_token_ids=prompt,
                    token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
                    behavior_logprobs=np.full(length, -np.log(vocab_size), np.float32),
                    segments=[Segment(WeightsName(1, 0), length)],
                    finish_reason=FinishReason.LENGTH,
                    temperature=1.0,
                )
            ],
            float(number % 2),
        )
        for number in range(NUM_SEQUENCES)
    ]
    return RolloutGroup(0, 1, 0, rollouts)


def flops_per_token(model: PolicyModel, num_tokens: int) -> float:
    """Of forward and backward: 6 N + 12 L H Q T, without what checkpointing computes again.

    N: weights that are multiplied with, a tied head once; L layers of H heads of size Q; T: length
    of a sequence. Source: arXiv:2204.02311 (PaLM), appendix B.
    """
    config: Any = model.module.config
    head_and_layers: int = sum(
        weight.numel() for name, weight in model.module.named_parameters()
        if weight.dim() > 1 and (config.tie_word_embeddings or "embed_tokens" not in name)
    )  # fmt: skip
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return float(6 * head_and_layers + 12 * attention * num_tokens)


def peak_of(card: str) -> float:
    """Peak of a card, from `PEAK_FLOPS`; 0: it is not in the table."""
    words = f"{card.replace('-', ' ')} "
    return next((flops for part, flops in PEAK_FLOPS.items() if f"{part} " in words), 0.0)


def _peak_memory(settings: Settings) -> dict[str, float]:
    if settings.cpu:
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_process_gib": peak_kib / 2**20}
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


PARTS = {
    "self_test": Part(self_test, 60.0),
    "step": Part(partial(step, gradient_checkpointing=False), 90.0),
    "step_checkpointed": Part(partial(step, gradient_checkpointing=True), 90.0),
    "probe_noise": Part(probe_noise, 60.0),
    "side_stream": Part(side_stream, 60.0),
    "quickstart": Part(gpu_day_engine.quickstart, 150.0),
    "transport_gloo": Part(partial(gpu_day_engine.transport, name="gloo"), 60.0, True),
    "transport_http": Part(partial(gpu_day_engine.transport, name="http"), 60.0, True),
    "transport_disk": Part(partial(gpu_day_engine.transport, name="disk"), 60.0, True),
    "doctor": Part(gpu_day_engine.doctor, 90.0, True),
}
"""In the order in which they are done; those that need an engine come last."""
