"""What trainer and engine hold in memory, by term, from a configuration and a model's files.

Worst cases: a micro-batch that is full, or the longest sequence of the run. State, copies and KV
are exact. Activations are what autograd keeps for a dense decoder with gated MLP, counted tensor by
tensor and compared with measured bytes in tests. Not counted: what the allocator leaves unused,
CUDA's own memory, and in a mixture of experts the activations of its experts. No torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.config.engine import EngineKind
from async_grpo.config.policy import DType
from async_grpo.config.schema import Config
from async_grpo.config.trainer import Attention
from async_grpo.errors import ConfigError
from async_grpo.weights.model_facts import (
    ModelFacts,
    cache_items_per_token,
    paged_context,
    paged_tokens,
)

ITEM_BYTES = {DType.float32: 4, DType.bfloat16: 2, DType.float64: 8}
_LOGITS = 3
"""Tensors of one chunk of logits that live at once in the backward pass of the head."""


@dataclass(frozen=True)
class Term:
    """One line of the table."""

    name: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True)
class _Shape:
    """Sizes of a dense decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    query: int
    """heads * head_dim"""
    kv_heads: int
    kv: int
    """kv_heads * head_dim"""
    vocabulary: int
    head_norms: bool
    """queries and keys are normalized head by head, as in Qwen3"""


def state_bytes(dtype: DType, num_parameters: int) -> int:
    """Weights, gradients, two moments, and float32 masters of a bfloat16 policy.

    16 bytes a parameter in float32, 18 in bfloat16, where masters, moments and gradients are
    float32; 32 in float64.
    """
    update_bytes = 8 if dtype is DType.float64 else 4
    masters = update_bytes if dtype is DType.bfloat16 else 0
    return num_parameters * (ITEM_BYTES[dtype] + masters + 3 * update_bytes)


def trainer_terms(config: Config, facts: ModelFacts) -> list[Term]:
    """What the trainer's device holds at its peak."""
    dtype = config.policy.dtype
    weights = facts.num_parameters * ITEM_BYTES[dtype]
    terms = [Term("state", state_bytes(dtype, facts.num_parameters))]
    if config.algorithm.kl_coef:
        terms.append(Term("reference", weights))
    terms.append(Term("snapshot", weights, "in host memory, except with nccl"))
    shape = _shape(facts.config)
    if shape is None:
        return terms
    tokens, row = microbatch_tokens(config, facts.config)
    again = config.trainer.gradient_checkpointing
    note = f"{tokens} tokens, gradient_checkpointing {'on' if again else 'off'}"
    terms.append(Term("activations", activation_bytes(config, facts.config, tokens, row), note))
    accumulator = 8 if dtype is DType.float64 else 4
    head = shape.vocabulary * shape.hidden * (accumulator + ITEM_BYTES[dtype])
    chunk = _LOGITS * config.trainer.logprob_chunk_tokens * shape.vocabulary * accumulator
    terms.append(Term("head", head + chunk, "gradient and logits of one chunk, not measured"))
    return terms


def microbatch_tokens(config: Config, model: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of the largest micro-batch, and of its rows, if sequences are at their longest."""
    longest = longest_sequence(config, model)
    return max(config.trainer.tokens_per_microbatch, longest), longest


def longest_sequence(config: Config, model: Mapping[str, Any]) -> int:
    """Prompt and completion: what engines allow, or a completion where they set no limit."""
    own = int(model.get("max_position_embeddings") or 0)
    return config.engine.context_length or min(
        own or config.generation.max_new_tokens, 2 * config.generation.max_new_tokens
    )


def activation_bytes(config: Config, model: Mapping[str, Any], tokens: int, row: int) -> int:
    """Bytes that autograd keeps of the layers, in rows of `row` tokens.

    With gradient_checkpointing each layer's input, and one layer computed again.
    """
    shape = _shape(model)
    assert shape is not None, "asked for a model of known shape"
    item = ITEM_BYTES[config.policy.dtype]
    packed = tokens >= 2 * row or config.trainer.attention is Attention.eager
    layer = tokens * _kept_per_token(shape, item, row, config.trainer.attention, packed=packed)
    accumulator = max(4, item)
    # behind the layers: the last norm, and the rotations that all layers share
    last = accumulator + item if item < accumulator else 2 * item
    rest = tokens * (last * shape.hidden + 2 * item * (shape.query // shape.heads) + 12)
    if not config.trainer.gradient_checkpointing:
        return shape.layers * layer + rest
    return shape.layers * tokens * item * shape.hidden + layer + rest


def _kept_per_token(
    shape: _Shape, item: int, row: int, attention: Attention, *, packed: bool
) -> int:
    """Bytes of one layer and token."""
    accumulator = max(4, item)
    low = item < accumulator
    # a norm keeps its input in float32, what it made of it, and in bfloat16 both dtypes of it
    norm = (2 * item + accumulator if low else 3 * item) * shape.hidden
    head_norm = 0
    if shape.head_norms:
        per = item + accumulator if low else 2 * item
        head_norm = per * (shape.query + shape.kv) + 4 * (shape.heads + shape.kv_heads)
    if attention is Attention.eager:
        weights = shape.heads * row * (accumulator + (item if low else 0))
        attended = 4 * item * shape.query + weights
    elif packed:
        attended = 4 * item * shape.query + 4 * shape.heads + item * row
    else:
        attended = 2 * item * (shape.query + shape.kv) + 4 * shape.heads
    return 2 * norm + head_norm + attended + 4 * item * shape.intermediate + 8


def engine_terms(config: Config, facts: ModelFacts) -> list[Term]:
    """What an engine holds beside its activations.

    Raises:
        ConfigError: the embedded engine's cache does not hold one sequence.
    """
    item = ITEM_BYTES[config.policy.dtype]
    terms = [Term("weights", facts.num_parameters * item)]
    per_token = cache_items_per_token(facts.config) * item
    if not per_token:
        return terms
    slots = config.engine.max_running_requests
    if config.engine.kind == EngineKind.embedded and not config.engine.urls:
        context = paged_context(
            facts.config, config.engine, item, max_new_tokens=config.generation.max_new_tokens
        )
        room = min(slots * context, paged_tokens(facts.config, config.engine, item))
        note = f"{room} tokens within engine.kv_cache_bytes; {slots} slots of {context}"
        return [*terms, Term("KV cache", room * per_token, note)]
    context = config.engine.context_length or int(facts.config.get("max_position_embeddings") or 0)
    note = f"if all {slots} slots are at {context} tokens; SGLang takes what its fraction leaves"
    return [*terms, Term("KV cache", slots * context * per_token, note)]


def memory_problems(config: Config, facts: ModelFacts) -> Iterator[str]:
    """Reasons to refuse the configuration."""
    try:
        engine_terms(config, facts)
    except ConfigError as error:
        yield str(error)
    limit = config.trainer.memory_bytes
    terms = [
        term for term in trainer_terms(config, facts)
        if term.name != "snapshot" or config.weights.backend == "nccl"
    ]  # fmt: skip
    total = sum(term.num_bytes for term in terms)
    if limit and total > limit:
        parts = ", ".join(f"{term.name} {size(term.num_bytes)}" for term in terms)
        yield (
            f"trainer.memory_bytes ({size(limit)}) is below the {size(total)} that the trainer "
            f"needs ({parts}): set trainer.gradient_checkpointing, or lower "
            "trainer.tokens_per_microbatch or engine.context_length"
        )


def _shape(model: Mapping[str, Any]) -> _Shape | None:
    """None: not all sizes are named."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
             "vocab_size")  # fmt: skip
    if any(not model.get(name) for name in names):
        return None
    layers, hidden, intermediate, heads, vocabulary = (int(model[name]) for name in names)
    kv_heads = int(model.get("num_key_value_heads") or heads)
    head_dim = int(model.get("head_dim") or hidden // heads)
    return _Shape(
        layers, hidden, intermediate, heads, heads * head_dim, kv_heads, kv_heads * head_dim,
        vocabulary, head_norms=str(model.get("model_type", "")).startswith("qwen3"),
    )  # fmt: skip


def size(num_bytes: float) -> str:
    """For people."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
