"""A tiny random Qwen3 policy and random groups for it."""

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_grpo.training.model import PolicyModel
from async_grpo.types import Completion, FinishReason, Rollout, RolloutGroup, Segment, WeightsName

VOCAB = 19


def tiny_config(**changes) -> Qwen3Config:
    settings = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    return Qwen3Config(**(settings | changes))


def tiny_module(*, dtype: torch.dtype = torch.float64, seed: int = 0, **changes):
    torch.manual_seed(seed)
    module = Qwen3ForCausalLM(tiny_config(**changes)).to(dtype)
    with torch.no_grad():  # random enough that attention and head matter
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    return module


def tiny_policy(
    *, dtype: torch.dtype = torch.float64, seed: int = 0, chunk: int = 7
) -> PolicyModel:
    return PolicyModel(tiny_module(dtype=dtype, seed=seed), chunk_tokens=chunk)


def random_groups(
    num_groups: int, group_size: int = 4, *, version: int = 0, seed: int = 0, max_tokens: int = 9
) -> list[RolloutGroup]:
    rng = np.random.default_rng(seed)
    groups = []
    for group_id in range(num_groups):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 6)).astype(np.int32)
        rollouts = []
        for member in range(group_size):
            count = int(rng.integers(1, max_tokens))
            head = count // 2
            segments = [Segment(WeightsName(1, version), count)]
            if head and version:
                segments = [
                    Segment(WeightsName(1, version - 1), head),
                    Segment(WeightsName(1, version), count - head, kv_mixed=True),
                ]
            completion = Completion(
                prompt_token_ids=prompt,
                token_ids=rng.integers(0, VOCAB, count).astype(np.int32),
                behavior_logprobs=-rng.uniform(0.5, 4.0, count).astype(np.float32),
                segments=segments,
                finish_reason=FinishReason.STOP,
                temperature=float(rng.choice([0.7, 1.0])),
            )
            rollouts.append(Rollout([completion], float(rng.normal()) + member))
        groups.append(RolloutGroup(group_id, 0, group_id, rollouts, sampled_ago_s=0.25))
    return groups
