"""What the files of a model tell without loading it: sizes, and positions that it cannot keep.

No torch: `check`, the trainer and the engine ask the same questions.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from async_grpo.config.engine import EngineSection
from async_grpo.errors import ConfigError

_UNSTEADY = ("dynamic", "longrope")
"""Kinds of rotary positions whose rotations depend on the longest sequence of a forward pass."""


@dataclass(frozen=True)
class ModelFacts:
    """What a model directory tells without loading it."""

    num_parameters: int
    """tied weights once: they are stored once"""
    config: Mapping[str, Any]
    """config.json, or its part about text"""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def read_model_facts(directory: Path) -> ModelFacts:
    """Read config.json and the headers of the safetensors files.

    Raises:
        FileNotFoundError: `directory` is no local directory with these files.
        ConfigError: a header cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    config_path = directory / "config.json"
    if not files or not config_path.exists():
        raise FileNotFoundError(f"no config.json and *.safetensors in {directory}")
    total = 0
    for path in files:
        with path.open("rb") as file:
            try:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            except ValueError as error:
                raise ConfigError(f"policy.model: {path} has no safetensors header") from error
        total += sum(
            prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        )
    config = json.loads(config_path.read_text(encoding="utf-8"))
    return ModelFacts(total, text_config(config))


def cache_items_per_token(model: Mapping[str, Any]) -> int:
    """Numbers that one token keeps as keys and values, over all layers; 0: unknown."""
    heads = int(model.get("num_attention_heads") or 0)
    if not heads:
        return 0
    head_dim = int(model.get("head_dim") or model["hidden_size"] // heads)
    kv_heads = int(model.get("num_key_value_heads") or heads)
    return 2 * int(model["num_hidden_layers"]) * kv_heads * head_dim


def paged_bytes_per_token(model: Mapping[str, Any], engine: EngineSection, item_bytes: int) -> int:
    """Bytes of the embedded engine's cache for each token: its KV, and its row of the mask."""
    mask = max(engine.max_batch_tokens, engine.max_running_requests)
    return item_bytes * (cache_items_per_token(model) + mask)


def paged_tokens(model: Mapping[str, Any], engine: EngineSection, item_bytes: int) -> int:
    """Tokens, in whole pages, that `engine.kv_cache_bytes` holds in the embedded engine."""
    page_bytes = paged_bytes_per_token(model, engine, item_bytes) * engine.page_size
    return engine.kv_cache_bytes // page_bytes * engine.page_size


def paged_context(
    model: Mapping[str, Any], engine: EngineSection, item_bytes: int, *, max_new_tokens: int
) -> int:
    """Longest prompt + completion of the embedded engine.

    Without `engine.context_length` it is the model's own limit, or what the cache holds if that is
    less.

    Raises:
        ConfigError: it is beyond the model's limit, the cache does not hold it, or the cache does
            not hold the longest completion and a prompt.
    """
    own = int(model.get("max_position_embeddings") or 0)
    wanted, room = engine.context_length, paged_tokens(model, engine, item_bytes)
    if not wanted and not own:
        raise ConfigError("engine.context_length must be set: the model names no limit of its own")
    if own and wanted > own:
        raise ConfigError(f"engine.context_length ({wanted}) exceeds the model's limit of {own}")
    least = -(-wanted // engine.page_size) * engine.page_size
    if least > room or not room:
        needed = max(least, engine.page_size) * paged_bytes_per_token(model, engine, item_bytes)
        raise ConfigError(
            f"engine.kv_cache_bytes ({engine.kv_cache_bytes}) must hold one sequence of {wanted} "
            f"tokens: at least {needed}; or lower engine.context_length"
        )
    if not wanted and room < own and room <= max_new_tokens:
        raise ConfigError(
            f"engine.kv_cache_bytes ({engine.kv_cache_bytes}) holds {room} tokens and the model's "
            f"limit is {own}: a completion of generation.max_new_tokens ({max_new_tokens}) leaves "
            "no room for a prompt"
        )
    return wanted or min(own, room)


def unsteady_border(model: Mapping[str, Any]) -> tuple[str, int] | None:
    """Kind of rotary positions, and the length beyond which one sequence changes those of others.

    With `dynamic` and `longrope` a sequence longer than this turns the rotations of all that share
    its forward pass, and a completion that grows over it changes its own in the middle.
    """
    found = []
    for rope in _ropes(model):
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        if kind in _UNSTEADY:
            own = int(model.get("max_position_embeddings") or 0)
            original = rope.get("original_max_position_embeddings") or model.get(
                "original_max_position_embeddings"
            )
            found.append((kind, int(original or own) if kind == "longrope" else own))
    return min(found, key=lambda pair: pair[1], default=None)


def require_steady_positions(model: Mapping[str, Any], context_length: int) -> None:
    """Refuse a run whose sequences may pass `unsteady_border`.

    Args:
        model: the text part of config.json.
        context_length: longest prompt + completion; 0: the model's own limit.

    Raises:
        ConfigError: names the limit to set.
    """
    border = unsteady_border(model)
    length = context_length or int(model.get("max_position_embeddings") or 0)
    if border is not None and length > border[1]:
        kind, tokens = border
        raise ConfigError(
            f"policy.model has {kind} positions: beyond {tokens} tokens one sequence changes the "
            "log-probs of others that share its forward pass, so the trainer and its engines "
            f"cannot agree; set engine.context_length to at most {tokens} (it is "
            f"{context_length or f'0, and the model allows {length}'})"
        )


def sliding_window(model: Mapping[str, Any]) -> int:
    """Tokens that a layer with a sliding window attends to; 0: no layer has one."""
    return int(model.get("sliding_window") or 0)


def _ropes(model: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every group of rotary parameters: one for all layers, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        group = model.get(name)
        if isinstance(group, Mapping):
            yield group
            yield from (part for part in group.values() if isinstance(part, Mapping))
