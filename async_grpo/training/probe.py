"""The probe of weight updates: ids that the initial policy samples, and what rounding does there.

Sampled ids are likely ones (a few nats each), so two correct computations of their log-probs agree
closely; random ids are unlikely (14 nats each) and disagree by more than some wrong weights do. No
text, tokenizer or task is needed. Knows no engine and no publish.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from async_grpo.training.model import LogprobRequest, PolicyModel

logger = logging.getLogger(__name__)

_NUM_SETS = 2
"""A failure is asked about once more, with other ids."""
NUM_TOKENS = {torch.bfloat16: 133, torch.float32: 29, torch.float64: 29}
"""Ids of one set. In bfloat16 only a mean over many positions tells a wrong tensor from rounding;
in float32 rounding is a thousand times smaller than what a wrong tensor does to any position."""
_ANY_DTYPE = ("sdpa", "eager")
"""Implementations of attention that compute in float32 and float64, too."""
_FINER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


def sample_probe(model: PolicyModel, *, seed: int) -> list[list[int]]:
    """The ids of a run's probe: as many as the dtype needs and the model's context holds."""
    module: Any = model.module
    text_config = module.config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None) or math.inf
    num_tokens = int(min(NUM_TOKENS[model.dtype], max(2, context)))
    return sample_ids(model, num_sets=_NUM_SETS, num_tokens=num_tokens, seed=seed)


def measure_noise(model: PolicyModel, sets: list[list[int]]) -> float:
    """`own_noise`, or 0 with a warning where the model does not compute in a finer dtype."""
    try:
        return own_noise(model, sets)
    except RuntimeError as error:
        logger.warning(
            "how far rounding moves log-probs is not known, so weights.probe_tolerance is its "
            "least value: %s", error,
        )  # fmt: skip
        return 0.0


@torch.no_grad()
def sample_ids(model: PolicyModel, *, num_sets: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Sequences that the model samples at temperature 1, each after one random id.

    Leaves torch's generators as they were. Never ends at an end of text: what follows one is a new
    text, which is as good.

    Args:
        model: its present weights sample.
        num_sets: sequences.
        num_tokens: ids of each, at least two.
        seed: of the first ids and of the sampling.
    """
    module: Any = model.module
    devices = [model.device] if model.device.type == "cuda" else []
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, top_k=0, min_new_tokens=num_tokens - 1, max_new_tokens=num_tokens - 1,
        use_cache=True, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        first = torch.randint(0, model.vocab_size, (num_sets, 1)).to(model.device)
        ids: Tensor = module.generate(
            first, attention_mask=torch.ones_like(first), generation_config=config
        )
    return ids.tolist()


@torch.no_grad()
def logprobs_of(model: PolicyModel, sets: list[list[int]]) -> Tensor:
    """[len(sets), length - 1] log-probs of ids 1.. given those before, at temperature 1.

    Args:
        model: the policy.
        sets: sequences of one length, at least two ids each.
    """
    ids = torch.tensor(sets, device=model.device)
    rows, length = ids.shape[0], ids.shape[1] - 1
    request = LogprobRequest(
        input_ids=ids[:, :-1],
        position_ids=torch.arange(length, device=model.device).expand(rows, length),
        rows=torch.arange(rows * length, device=model.device),
        targets=ids[:, 1:].reshape(-1),
        temperature=torch.ones(rows * length, dtype=model.accumulation_dtype, device=model.device),
    )
    logprobs, _ = model.logprobs(request)
    return logprobs.detach().view(rows, length)


@torch.no_grad()
def own_noise(model: PolicyModel, sets: list[list[int]]) -> float:
    """Mean |log-prob difference| between the policy's dtype and the next finer one, nats.

    0 in float64, which has no finer dtype. Holds no second copy of the model: each layer's weights
    are raised while it computes.

    Args:
        model: the policy.
        sets: sequences of one length, at least two ids each.

    Raises:
        RuntimeError: the model does not compute in the finer dtype.
    """
    finer = _FINER.get(model.dtype)
    if finer is None:
        return 0.0
    module: Any = model.module
    ids = torch.tensor(sets, device=model.device)
    with _raised(module, finer):
        logits: Tensor = module(input_ids=ids[:, :-1], use_cache=False).logits
    exact = logits.double().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return float((logprobs_of(model, sets).double() - exact).abs().mean())


@contextmanager
def _raised(module: Any, dtype: torch.dtype) -> Iterator[None]:
    """Every layer finds its own floating-point weights in `dtype` while its forward runs."""
    attention = module.config._attn_implementation
    if attention not in _ANY_DTYPE:
        module.set_attn_implementation(_ANY_DTYPE[0])
    kept: dict[nn.Module, dict[str, Any]] = {}

    def raise_weights(layer: nn.Module, _inputs: object) -> None:
        kept[layer] = dict(layer._parameters)
        for name, weight in kept[layer].items():
            if weight is not None and weight.is_floating_point():
                layer._parameters[name] = weight.to(dtype)

    def restore(layer: nn.Module, _inputs: object, _output: object) -> None:
        if layer in kept:
            layer._parameters.update(kept.pop(layer))

    handles = []
    for layer in module.modules():
        if any(True for _ in layer.parameters(recurse=False)):
            handles.append(layer.register_forward_pre_hook(raise_weights))
            handles.append(layer.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in list(kept):
            restore(layer, None, None)
        if attention not in _ANY_DTYPE:
            module.set_attn_implementation(attention)
