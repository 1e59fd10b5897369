"""The trained policy as a transformers causal language model. Knows no objective and no batch."""

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from async_grpo.algorithms.head import accumulator, use_float32_logits
from async_grpo.config.policy import PolicySection
from async_grpo.config.trainer import Attention, TrainerSection
from async_grpo.errors import AsyncGrpoError, ConfigError
from async_grpo.training.logprobs import chosen_logprobs
from async_grpo.weights.pretrained import load_pretrained

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "generation_config.json",
)  # fmt: skip
_PACKAGES = {
    Attention.flash_attention_2: (is_flash_attn_2_available, "flash-attn"),
    Attention.flash_attention_3: (is_flash_attn_3_available, "flash-attn-3"),
}


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Where to take log-probs: see `batching.MicroBatch` for shapes."""

    input_ids: Tensor
    position_ids: Tensor
    rows: Tensor
    targets: Tensor
    temperature: Tensor


class PolicyModel:
    """A causal language model that answers with log-probs of chosen tokens.

    Args:
        module: of transformers.
        chunk_tokens: rows of the head computed at a time.
        fp32_head: logits of a low-precision model in float32, also those of `module` itself.

    Raises:
        ConfigError: the head is no plain linear layer, or what is below it cannot be had.

    Attributes:
        module: the transformers model.
        dtype: of its weights.
        accumulation_dtype: of log-probs: float32 or better.
    """

    def __init__(self, module: Any, *, chunk_tokens: int, fp32_head: bool = True) -> None:
        head = module.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise ConfigError(
                f"policy.model: {type(module).__name__} has no plain linear head; its log-probs "
                "cannot be made in chunks"
            )
        if module.base_model is module:
            raise ConfigError(
                f"policy.model: {type(module).__name__} does not name the part below its head; its "
                "hidden states cannot be had"
            )
        self.module: nn.Module = module
        self.module.config.use_cache = False  # a cache would silently break packing
        self._backbone: nn.Module = module.base_model
        self._head_weight: Tensor = head.weight
        self._fp32_head = fp32_head
        if fp32_head:
            use_float32_logits(head)
        self._chunk_tokens = chunk_tokens
        self.dtype: torch.dtype = module.dtype
        self.accumulation_dtype = accumulator(self.dtype)
        self.device: torch.device = module.device

    def checkpoint_layers(self) -> None:
        """From now on keep only each layer's input for the backward pass.

        transformers' own switch acts in training mode only, where dropout and noise of routers act
        too. This one acts whenever gradients are made.

        Raises:
            ConfigError: the model is not made of transformers' layers.
        """
        layers: list[Any] = [
            module
            for module in self._backbone.modules()
            if isinstance(module, GradientCheckpointingLayer)
        ]
        if not layers:
            raise ConfigError(
                f"trainer.gradient_checkpointing: {type(self.module).__name__} has no layers that "
                "can be computed again"
            )
        for layer in layers:
            layer.forward = partial(_again_in_backward, layer.forward)

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of config.json that describes the language model."""
        config: Any = self.module.config
        found: dict[str, Any] = config.get_text_config().to_dict()
        return found

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return int(self._head_weight.shape[0])

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Last hidden states [R, L, H]; no mask and no cache: `position_ids` tell the sequences."""
        output = self._backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logprobs(self, request: Any) -> tuple[Tensor, Tensor]:
        """Log-probs [N] of the targets and entropies [N], in nats, with gradient.

        Args:
            request: a `LogprobRequest` or anything with its fields (`batching.MicroBatch`).
        """
        hidden = self.hidden_states(request.input_ids, request.position_ids)
        return chosen_logprobs(
            hidden.flatten(0, 1).index_select(0, request.rows),
            self._head_weight,
            request.targets,
            request.temperature,
            chunk_tokens=self._chunk_tokens,
            fp32_head=self._fp32_head,
        )


def _again_in_backward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward`, whose intermediate tensors are not kept but made again."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # nothing in evaluation mode draws random numbers, so none of their state is kept
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def load_policy(
    policy: PolicySection,
    settings: TrainerSection,
    device: torch.device,
    *,
    trainable: bool = True,
) -> PolicyModel:
    """Load the weights of `policy.model`, in evaluation mode.

    That is the mode of the engines that sampled: no dropout, no noise of routers.

    Args:
        policy: section `policy`.
        settings: section `trainer`: how log-probs and attention are computed.
        device: where it computes.
        trainable: False: frozen, as a reference policy.

    Raises:
        ConfigError: the model cannot be loaded or used in this way, or a package is missing.
    """
    _require_attention(settings.attention, device)
    dtype: torch.dtype = getattr(torch, policy.dtype.value)
    module = load_pretrained(policy.model, dtype, attn_implementation=settings.attention.value)
    module.to(device)
    module.eval()
    module.requires_grad_(trainable)
    model = PolicyModel(
        module, chunk_tokens=settings.logprob_chunk_tokens, fp32_head=settings.fp32_head
    )
    if trainable and settings.gradient_checkpointing:
        model.checkpoint_layers()
    return model


def _require_attention(attention: Attention, device: torch.device) -> None:
    if attention in (Attention.sdpa, Attention.eager):
        return
    if attention in _PACKAGES:
        is_installed, package = _PACKAGES[attention]
        if not is_installed():
            raise ConfigError(
                f"trainer.attention={attention} needs the package {package}, which is not "
                "installed here; sdpa needs none"
            )
    if device.type != "cuda":
        raise ConfigError(
            f"trainer.attention={attention} needs a CUDA device, and the trainer's is {device}; "
            "sdpa and eager run everywhere"
        )


def save_policy(model: PolicyModel, source: str, directory: Path) -> None:
    """Write a Hugging Face directory: weights, configuration, and the tokenizer of `source`.

    The directory appears whole or not at all; an earlier one is replaced.

    Raises:
        AsyncGrpoError: there is no room for the weights.
    """
    staging = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        _write_policy(model, source, staging)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)  # where the disk is full, others need room
        if isinstance(error, SafetensorError):  # safetensors has its own for a full disk
            raise AsyncGrpoError(f"{directory} cannot be written: {error}") from error
        raise
    if directory.exists():
        retired = directory.with_name(f".{directory.name}.{os.getpid()}.retired")
        directory.rename(retired)
        staging.rename(directory)
        shutil.rmtree(retired)
    else:
        staging.rename(directory)


def _write_policy(model: PolicyModel, source: str, directory: Path) -> None:
    module: Any = model.module
    module.save_pretrained(directory)
    if Path(source).is_dir():
        for pattern in _TOKENIZER_FILES:
            for path in Path(source).glob(pattern):
                if not (directory / path.name).exists():
                    shutil.copy2(path, directory / path.name)
    else:
        AutoTokenizer.from_pretrained(source).save_pretrained(directory)
