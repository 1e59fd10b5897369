"""`async-grpo check`: the resolved configuration and what follows from it. No torch.

Figures are worst cases (every completion at full length); measured ones are in metrics.jsonl.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from async_grpo.algorithms.staleness import worst_case
from async_grpo.config import objective_text
from async_grpo.config.alarms import AlarmAction, AlarmsSection
from async_grpo.config.devices import starts_on_cards
from async_grpo.config.engine import EngineKind
from async_grpo.config.eval import EvalSection
from async_grpo.config.limits import checkpoint_warning
from async_grpo.config.load import agreement_digest, to_yaml
from async_grpo.config.rules import group_bytes_bound, least_depth, max_groups, warnings
from async_grpo.config.schema import Config
from async_grpo.config.staleness import DEFAULT_TARGET_ESS, Controller
from async_grpo.devices.cards import placement
from async_grpo.errors import ConfigError
from async_grpo.launch.memory import (
    ITEM_BYTES,
    engine_terms,
    memory_problems,
    size,
    trainer_terms,
)
from async_grpo.weights.addresses import is_own_address
from async_grpo.weights.model_facts import read_model_facts


def describe(config: Config) -> str:
    """YAML, then comment lines: the whole is still a configuration that can be loaded.

    Raises:
        ConfigError: what is known of the model does not fit the memory.
    """
    if problems := list(_of_its_memory(config)):
        raise ConfigError(problems)
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
    yield "payload per step", f"<= {size(payload)} + 4 bytes per prompt token and completion"
    limit = f"{size(config.replay.max_bytes)} or {max_groups(config)} groups"
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


def _of_its_memory(config: Config) -> Iterator[str]:
    """Problems of the model's size, where it is there."""
    try:
        facts = read_model_facts(Path(config.policy.model))
    except FileNotFoundError:
        return
    yield from memory_problems(config, facts)


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
    item_bytes = ITEM_BYTES[config.policy.dtype]
    weights = facts.num_parameters * item_bytes
    publishes = -(-config.run.num_train_steps // config.weights.publish_every) + 1
    yield "model", f"{facts.num_parameters:,} parameters"
    yield "bytes per publish", f"{size(weights)} to each engine, {publishes} publishes"
    for side, terms in (
        ("trainer", trainer_terms(config, facts)),
        ("engine", engine_terms(config, facts)),
    ):
        for term in terms:
            note = term.note and f" ({term.note})"
            yield f"{side}: {term.name}", f"{size(term.num_bytes)}{note}"
        if side == "trainer" or config.engine.kind == EngineKind.embedded:  # SGLang takes its share
            yield f"{side} memory", f"{size(sum(term.num_bytes for term in terms))} in all"
