"""`async-grpo check`: the resolved configuration and what follows from it. No torch.

Figures are worst cases (every completion at full length); measured ones are in metrics.jsonl.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from async_grpo.algorithms.staleness import worst_case
from async_grpo.config import objective_text
from async_grpo.config.alarms import AlarmAction, AlarmsSection
from async_grpo.config.devices import starts_on_cards
from async_grpo.config.eval import EvalSection
from async_grpo.config.limits import checkpoint_warning
from async_grpo.config.load import agreement_digest, to_yaml
from async_grpo.config.policy import DType
from async_grpo.config.rules import group_bytes_bound, least_depth, max_groups, warnings
from async_grpo.config.schema import Config
from async_grpo.config.staleness import DEFAULT_TARGET_ESS, Controller
from async_grpo.devices.cards import placement
from async_grpo.errors import ConfigError
from async_grpo.weights.addresses import is_own_address

_ITEM_BYTES = {DType.float32: 4, DType.bfloat16: 2, DType.float64: 8}
_STATE_COPIES = 4
"""Weights, gradients and two moments of AdamW."""


def describe(config: Config) -> str:
    """YAML, then comment lines: the whole is still a configuration that can be loaded."""
    lines = [f"# {label:<22}{value}" for label, value in _derived(config)]
    lines += [f"# warning: {text}" for text in [*warnings(config), *_of_its_size(config)]]
    return to_yaml(config) + "\n" + "\n".join(lines) + "\n"


def objective_line(config: Config) -> str:
    """The resolved objective in one line."""
    preset = config.algorithm.preset
    return f"{preset}: {objective_text.objective_line(config.algorithm)}"


def _derived(config: Config) -> Iterator[tuple[str, str]]:
    depth = config.staleness.depth
    per_step, group_size = config.replay.groups_per_step, config.generation.group_size
    window = (depth + 1) * per_step
    samples = per_step * group_size
    yield "objective", objective_line(config)
    if note := objective_text.clip_note(config.algorithm, config.trainer.updates_per_step):
        yield "clip inert", note
    yield "zero-variance groups", str(config.algorithm.zero_variance)
    yield "window", f"{window} groups in flight and stored ((D + 1) * P = {depth + 1} * {per_step})"
    yield "staleness", _staleness(config)
    if config.staleness.controller is Controller.ess:
        target = config.staleness.target_ess or DEFAULT_TARGET_ESS
        bounds = f"{least_depth(config)} to {config.staleness.max_staleness}"
        yield "depth controller", f"D moves within {bounds} to hold an ESS of {target:g}"
    if acting := _acting_alarms(config.alarms):
        yield "alarms", f"{acting}; the others warn"
    yield "one step", f"{per_step} groups, {samples} completions"
    tokens = samples * config.generation.max_new_tokens
    yield "tokens per step", f"<= {tokens:,} sampled"
    payload = per_step * group_bytes_bound(config)
    yield "payload per step", f"<= {_size(payload)} + 4 bytes per prompt token and completion"
    limit = f"{_size(config.replay.max_bytes)} or {max_groups(config)} groups"
    yield "replay buffer", f"{limit}, then producers wait"
    if config.eval.every:
        yield "evaluation", _evaluation(config.eval)
    yield "whole run", f"{config.run.num_train_steps * per_step:,} groups trained"
    if starts_on_cards(config.engine):
        here = is_own_address(config.weights.host)
        yield "cards", placement(config, os.environ, trainer_here=here)
    yield from _model(config)
    yield "digest", f"{agreement_digest(config)} (equal on all roles of a run)"


def _acting_alarms(section: AlarmsSection) -> str:
    """Alarms that do more than warn."""
    actions = (action for action in AlarmAction if action is not AlarmAction.warn)
    parts = [(action, section.uses(action)) for action in actions]
    return "; ".join(f"{action}: {', '.join(names)}" for action, names in parts if names)


def _staleness(config: Config) -> str:
    section = config.staleness
    worst = worst_case(
        max_staleness=section.max_staleness,
        publish_every=config.weights.publish_every,
        updates_per_step=config.trainer.updates_per_step,
    )
    typical = f"{section.depth} typical (D)" if section.force is None else f"{section.force} forced"
    return (
        f"{typical}, never above {worst['steps']} (S) train steps, that is "
        f"{worst['updates']} optimizer updates, {worst['publishes']} publishes"
    )


def _evaluation(section: EvalSection) -> str:
    return (
        f"{section.num_prompts} held-out prompts * {section.num_completions} completions every "
        f"{section.every} steps; {section.held_out_fraction:.0%} of the task is held out"
    )


def _of_its_size(config: Config) -> Iterator[str]:
    """Warnings that depend on the model's size, where it is there."""
    try:
        facts = read_model_facts(Path(config.policy.model))
    except FileNotFoundError:
        return
    if text := checkpoint_warning(config, facts.num_parameters):
        yield text


def _model(config: Config) -> Iterator[tuple[str, str]]:
    try:
        facts = read_model_facts(Path(config.policy.model))
    except FileNotFoundError as error:
        yield "model", f"unknown until it is there: {error}"
        return
    item_bytes = _ITEM_BYTES[config.policy.dtype]
    weights = facts.num_parameters * item_bytes
    publishes = -(-config.run.num_train_steps // config.weights.publish_every) + 1
    yield "model", f"{facts.num_parameters:,} parameters"
    yield "bytes per publish", f"{_size(weights)} to each engine, {publishes} publishes"
    copies = _STATE_COPIES + (1 if config.algorithm.kl_coef else 0)
    yield "trainer memory", f"{_size(copies * weights)} + activations"
    tokens = _cache_tokens(config, facts.config)
    cache = _cache_items_per_token(facts.config) * item_bytes * tokens
    if cache:
        yield (
            "engine memory",
            f"{_size(weights)} weights + {_size(cache)} KV cache ({tokens} tokens)",
        )


@dataclass(frozen=True)
class ModelFacts:
    """What a model directory tells without loading it."""

    num_parameters: int
    """tied weights once: they are stored once"""
    config: dict[str, Any]


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
    return ModelFacts(total, json.loads(config_path.read_text(encoding="utf-8")))


def _cache_tokens(config: Config, model: dict[str, Any]) -> int:
    length = config.engine.context_length or int(model.get("max_position_embeddings", 0))
    return int(config.engine.max_running_requests) * length


def _cache_items_per_token(model: dict[str, Any]) -> int:
    """Numbers that one token keeps as keys and values, over all layers."""
    heads = int(model.get("num_attention_heads", 0))
    if not heads:
        return 0
    head_dim = int(model.get("head_dim") or model["hidden_size"] // heads)
    kv_heads = int(model.get("num_key_value_heads") or heads)
    return 2 * int(model["num_hidden_layers"]) * kv_heads * head_dim


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
