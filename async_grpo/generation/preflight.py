"""Whether trainer and engines fit each other and their cards, before anything is loaded.

Two environments that work apart may not work together: NCCL refuses another version of itself, a
card that is shared, a driver too old for one of them. Each interpreter is asked in a process of its
own (`devices.probe`), so this needs no torch; what is compared are its answers. Knows the machine
that it runs on: a trainer elsewhere is taken to have this interpreter's torch.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from async_grpo.config.devices import (
    INSTEAD,
    cards_of,
    server_flag,
    starts_on_cards,
    trainer_card,
)
from async_grpo.config.engine import EngineKind
from async_grpo.config.schema import Config
from async_grpo.config.weights import Backend, Transport
from async_grpo.devices.cards import ROOT, look_up_all, place_engines
from async_grpo.devices.facts import Asked, CardFacts, Facts, gib
from async_grpo.errors import ConfigError
from async_grpo.generation.sglang_server import require_interpreter, server_variables
from async_grpo.weights.addresses import is_own_address

INSTALL = "install one torch in both (constraints-gpu.txt, docs/gpu.md)"
FRACTION = "--mem-fraction-static"


@dataclass(kw_only=True)
class Preflight:
    """What was found."""

    skipped: str = ""
    """why nothing was asked"""
    sides: list[str] = field(default_factory=list)
    """what each side computes with, a line each"""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def require(self, say: Callable[[str], None]) -> None:
        """Say what each side computes with, and what is unwise.

        Raises:
            ConfigError: every problem.
        """
        for line in [*self.sides, *(f"warning: {text}" for text in self.warnings)]:
            say(line)
        if self.problems:
            raise ConfigError(self.problems)


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What there is to compare."""

    config: Config
    trainer: Facts
    engine: Facts
    device_ids: Sequence[str]
    """of the engines here, as the configuration counts"""
    trainer_here: bool
    python: str
    """the trainer's interpreter"""


def preflight(
    config: Config,
    *,
    whole_run: bool,
    environ: Mapping[str, str] = os.environ,
    root: Path = ROOT,
    python: str = sys.executable,
) -> Preflight:
    """Ask the interpreters of trainer and engines, and compare what they say.

    Args:
        config: whose engines would be started here.
        whole_run: trainer and all generators are here; else one generator is, and the trainer if
            weights.host is an address of this machine.
        environ: of the roles.
        root: where `dev` and `proc` are.
        python: the trainer's interpreter.

    Raises:
        ConfigError: too few cards, one that is not there, or an interpreter that does not answer.
    """
    if reason := why_skipped(config):
        return Preflight(skipped=reason)
    require_interpreter(config.engine)
    here = whole_run or is_own_address(config.weights.host)
    placed = place_engines(
        config,
        environ,
        trainer_here=here,
        num_generators=config.launch.num_generators if whole_run else 1,
        root=root,
    )
    device_ids = [devices for generator in placed for devices in generator]
    look_up_all(device_ids, config.engine, environ, root)  # at once, without an interpreter
    variables = server_variables(config.engine, {**environ, **config.engine.environment})
    asked = [Asked(python, environ, "this interpreter")]
    try:
        asked.append(Asked(config.engine.python, variables, "engine.python"))
        trainer, engine = (each.answer() for each in asked)
    finally:
        for each in asked:
            each.end()
    return compare(
        Sides(
            config=config,
            trainer=trainer,
            engine=engine,
            device_ids=device_ids,
            trainer_here=here,
            python=python,
        )
    )


def why_skipped(config: Config) -> str:
    """Why there is nothing to compare; empty: there is."""
    engine = config.engine
    if engine.urls:
        return (
            "engines are attached, and do not tell their NCCL: with weights.backend=nccl it must "
            "be the trainer's (docs/gpu.md)"
        )
    if engine.kind == EngineKind.embedded:
        return "the embedded engine computes in the trainer's own environment"
    if engine.kind != EngineKind.sglang:
        return f"what engine.kind={engine.kind} computes with is not known here"
    if not starts_on_cards(engine):
        return f"SGLang computes on {server_flag(engine, '--device')}, not on NVIDIA cards"
    return ""


def compare(sides: Sides) -> Preflight:
    """Every reason why these would not work together."""
    config, trainer, engine = sides.config, sides.trainer, sides.engine
    found = Preflight(
        sides=[
            f"trainer ({sides.python}): {trainer}",
            f"engines ({config.engine.python}): {engine}",
        ]
    )
    number = trainer_card(config.trainer.device)
    if sides.trainer_here and number is not None:
        # without any card `auto` is the CPU, and only the engines' lack of one is a problem
        if trainer.problem and (config.trainer.device != "auto" or engine.cards or trainer.driver):
            found.problems.append(
                f"trainer.device={config.trainer.device}: {trainer.unusable()}; to go on without "
                "the card set trainer.device=cpu"
            )
        elif trainer.cards and number >= len(trainer.cards):
            found.problems.append(
                f"trainer.device={config.trainer.device}: CUDA shows the trainer "
                f"{len(trainer.cards)} cards, counted from 0"
            )
    if engine.problem:
        found.problems.append(
            f"engine.python: {config.engine.python}: {engine.unusable()}; for engines on the CPU "
            "add --device=cpu to engine.server_args"
        )
    if found.problems:
        return found  # without CUDA nothing else can be compared
    cards = _engine_cards(sides, found)
    shared = _shared_with_trainer(sides, cards)
    if _uses_nccl(config, shared):
        if problem := nccl_problem(sides):
            (found.problems if sides.trainer_here else found.warnings).append(problem)
        if shared:
            found.problems.append(
                f"engine.device_ids: {shared} is the trainer's too, and NCCL refuses a shared "
                f"card: name another, or {INSTEAD}"
            )
        if config.weights.engines_per_cell > 1:
            found.problems += _shared_by_engines(cards)
    _look_at_memory(config, cards, found)
    return found


def nccl_problem(sides: Sides) -> str:
    """Why their NCCL cannot work together; empty: it can."""
    trainer, engine = sides.trainer, sides.engine
    if trainer.nccl and trainer.nccl == engine.nccl:
        return ""
    python = sides.config.engine.python
    whose = "the trainer has" if sides.trainer_here else "the trainer, if it has what is here, has"
    return (
        f"weights.backend={sides.config.weights.backend}: NCCL works with its own version only; "
        f"{whose} {trainer.nccl or 'none'} (torch {trainer.torch}, {sides.python}), the engines "
        f"have {engine.nccl or 'none'} (torch {engine.torch}, {python}): {INSTALL}, or {INSTEAD}"
    )


def _uses_nccl(config: Config, shared: str) -> bool:
    if Transport.broadcast not in config.weights.transports():
        return False
    if config.weights.backend is Backend.auto:
        return trainer_card(config.trainer.device) is not None and not shared
    return config.weights.backend is Backend.nccl


def _engine_cards(sides: Sides, found: Preflight) -> list[list[CardFacts]]:
    """The cards of each engine, as far as CUDA shows them; a problem for each that it does not."""
    every: list[list[CardFacts]] = []
    for slot, devices in enumerate(sides.device_ids):
        every.append([])
        for item in cards_of(devices):
            card = _find(item, sides.engine.cards)
            if card is not None:
                every[-1].append(card)
            elif not item.startswith("MIG-"):  # listed only where it is made visible by name
                found.problems.append(
                    f"engine.device_ids: card {item} of engine {slot} is none of the "
                    f"{len(sides.engine.cards)} that CUDA shows {sides.config.engine.python}"
                )
    return every


def _find(item: str, cards: Sequence[CardFacts]) -> CardFacts | None:
    if item.isdecimal():
        return cards[int(item)] if int(item) < len(cards) else None
    uuid = item.removeprefix("GPU-")
    return next((card for card in cards if card.uuid and card.uuid.startswith(uuid)), None)


def _same(one: CardFacts, other: CardFacts) -> bool:
    return bool(one.uuid) and one.uuid == other.uuid


def _shared_with_trainer(sides: Sides, cards: list[list[CardFacts]]) -> str:
    """An engine's card that is the trainer's; empty: none."""
    number = trainer_card(sides.config.trainer.device)
    if not sides.trainer_here or number is None or number >= len(sides.trainer.cards):
        return ""
    own = sides.trainer.cards[number]
    for slot, each in enumerate(cards):
        if any(_same(own, card) for card in each):
            return f"the card of engine {slot} ({own.name}, GPU-{own.uuid})"
    return ""


def _shared_by_engines(cards: list[list[CardFacts]]) -> list[str]:
    return [
        f"engine.device_ids: engines {one} and {two} have the same card (GPU-{card.uuid}), and "
        "NCCL refuses a shared card within a cell: give each its own, or set "
        "weights.engines_per_cell=1"
        for (one, ones), (two, others) in combinations(enumerate(cards), 2)
        for card in ones
        if any(_same(card, other) for other in others)
    ]


def _look_at_memory(config: Config, cards: list[list[CardFacts]], found: Preflight) -> None:
    """Room for a bucket beside what SGLang takes; cards that others fill."""
    text = server_flag(config.engine, FRACTION)
    try:
        fraction = float(text) if text else None
    except ValueError:
        found.problems.append(f"engine.server_args: {FRACTION}={text} is no number")
        return
    bucket = config.weights.bucket_bytes
    buckets = Transport.broadcast in config.weights.transports()
    for slot, card in ((slot, card) for slot, each in enumerate(cards) for card in each):
        if card.free_bytes is not None and card.free_bytes < card.total_bytes / 2:
            found.warnings.append(
                f"engine {slot}: another program fills its card: {gib(card.free_bytes)} of "
                f"{gib(card.total_bytes)} are free"
            )
        if card.problem:
            found.warnings.append(f"engine {slot}: its card cannot be used now: {card.problem}")
        if fraction is None or not buckets:
            continue
        room = card.total_bytes * (1 - fraction)
        if bucket > room / 2:
            text = (
                f"weights.bucket_bytes ({gib(bucket)}): engine {slot} receives it beside "
                f"{FRACTION}={fraction:g}, which leaves {gib(room)} of {gib(card.total_bytes)} for "
                "it, for activations and for CUDA graphs: lower one of them"
            )
            (found.problems if bucket > room else found.warnings).append(text)
