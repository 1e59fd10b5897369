"""Load the policy for the embedded engine. Knows nothing of requests."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation.continuous_batching.utils import find_head_dim

from async_grpo.algorithms.head import use_float32_logits
from async_grpo.config.schema import Config
from async_grpo.devices.choice import HIDE_CARDS_OF_ENGINES, auto_device
from async_grpo.engine.admission import Limits
from async_grpo.errors import ConfigError
from async_grpo.weights.model_facts import paged_context, require_steady_positions
from async_grpo.weights.pretrained import load_pretrained

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """The policy and what the engine must know of it."""

    module: Any
    """transformers PreTrainedModel, in evaluation mode"""
    path: str
    limits: Limits
    eos_token_ids: tuple[int, ...]
    """ends of a completion by the model's and the tokenizer's own configuration"""
    device: torch.device


def load_model(config: Config) -> LoadedModel:
    """The policy of `config` in its dtype, on the GPU if there is one.

    Raises:
        ConfigError: the model cannot be loaded, the context length does not fit it, its attention
            keeps what the KV cache has no room for, or there is a GPU that torch cannot use.
    """
    path = config.policy.model
    device = auto_device("the embedded engine", HIDE_CARDS_OF_ENGINES)
    module = load_pretrained(path, getattr(torch, config.policy.dtype.value))
    try:
        eos_token_ids = _eos_token_ids(module, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.model: no tokenizer of {path!r}: {error}") from error
    module = module.to(device).eval().requires_grad_(False)
    _require_paged_cache(module)
    head = module.get_output_embeddings()
    if config.trainer.fp32_head and isinstance(head, torch.nn.Linear):
        use_float32_logits(head)  # as the trainer computes them
    text_config = module.config.get_text_config()
    context_length = paged_context(
        text_config.to_dict(),
        config.engine,
        module.dtype.itemsize,
        max_new_tokens=config.generation.max_new_tokens,
    )
    require_steady_positions(text_config.to_dict(), context_length)
    if not config.engine.context_length:
        logger.info("sequences of up to %d tokens", context_length)
    return LoadedModel(
        module=module,
        path=path,
        limits=Limits(
            vocab_size=text_config.vocab_size,
            context_length=context_length,
        ),
        eos_token_ids=eos_token_ids,
        device=device,
    )


@torch.no_grad()
def _require_paged_cache(module: Any) -> None:
    """Refuse what transformers' paged cache cannot hold: it has keys and values of one size.

    Multi-head latent attention (DeepSeek-V2 and V3) has two sizes, linear attention has states.
    """
    layers = DynamicCache(config=module.config).layers
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        raise _unfit(module, "it has linear attention, whose states the paged cache does not hold")
    ids = torch.zeros(1, 2, dtype=torch.long, device=module.device)
    cache = module(input_ids=ids, use_cache=True).past_key_values
    wanted = find_head_dim(module.config.get_text_config())
    for number, layer in enumerate(cache.layers):
        sizes = [part.shape[-1] for part in (layer.keys, layer.values) if part is not None]
        if sizes != [wanted, wanted]:
            raise _unfit(
                module,
                f"keys and values of its layer {number} have sizes {sizes}, and the paged cache "
                f"holds {wanted} of each",
            )


def _unfit(module: Any, why: str) -> ConfigError:
    return ConfigError(
        f"policy.model: the embedded engine cannot serve {type(module).__name__}: {why}; serve it "
        "by SGLang (engine.kind=sglang)"
    )


def _eos_token_ids(module: Any, path: str) -> tuple[int, ...]:
    """Union of the generation config's, the model config's and the tokenizer's, as SGLang does."""
    found: set[int] = set()
    for owner in (module.generation_config, module.config):
        value = getattr(owner, "eos_token_id", None)
        found.update(value if isinstance(value, list) else () if value is None else (value,))
    directory = Path(path)
    if directory.is_dir() and not (directory / "tokenizer_config.json").exists():
        # transformers would make one up from the model type, with an end token of its own
        logger.info("%s has no tokenizer; only the model's own end tokens count", path)
    else:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if tokenizer.eos_token_id is not None:
            found.add(tokenizer.eos_token_id)
    return tuple(sorted(token for token in found if token >= 0))
