"""Tiny random models whose tensors are not those of their files: experts, and a buffer."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from async_grpo.training.toy import make_toy_tokenizer

_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
_GROUPS = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "glm4_moe": _GROUPS,
    "deepseek_v3": _GROUPS | {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
        # of the family's config.json, for servers
        "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mixtral": {"num_local_experts": 4},
}  # fmt: skip
_LINEAR_ATTENTION = {
    "qwen3_next": {
        "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    },
}  # fmt: skip
_ALL = KINDS | _LINEAR_ATTENTION
BUFFER = "model.layers.1.mlp.gate.e_score_correction_bias"
"""of glm4_moe and deepseek_v3; float32 in every model"""


def tiny_moe(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model of `KINDS`, made in memory."""
    torch.manual_seed(seed)
    vocab_size = len(make_toy_tokenizer())
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, **(_SIZES | _ALL[kind]))
    module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)  # else every log-prob is -log V, whatever goes wrong
        for name, buffer in module.named_buffers():
            if name == BUFFER:
                buffer.copy_(torch.randn(buffer.shape) * 0.1)
    return module


def save_tiny_moe(kind: str, directory: Path, *, seed: int = 0) -> Path:
    """The model's Hugging Face directory, in float32, with the toy tokenizer."""
    tiny_moe(kind, seed=seed).save_pretrained(directory)
    make_toy_tokenizer().save_pretrained(directory)
    return directory
