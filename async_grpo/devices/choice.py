"""Where a process computes: the device of a name, or of `auto`.

`auto` is never the CPU in silence: a card that torch cannot use is an error.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from async_grpo.devices.cards import ROOT, VARIABLE, num_device_files, visible_cards
from async_grpo.devices.facts import Facts
from async_grpo.devices.probe import collect
from async_grpo.errors import ConfigError

logger = logging.getLogger(__name__)

_HIDE_CARDS = f"start with {VARIABLE}= (empty)"
HIDE_CARDS_OF_ENGINES = (
    f"to go on without the card set engine.environment.{VARIABLE}='', or {_HIDE_CARDS}"
)


def resolve_device(
    name: str, *, environ: Mapping[str, str] = os.environ, root: Path = ROOT
) -> torch.device:
    """The device of `trainer.device`. `auto`: the first card, or the CPU where there is none.

    Raises:
        ConfigError: no such device; or `auto`, and there is a card that torch cannot use.
    """
    if name == "auto":
        advice = f"to go on without the card set trainer.device=cpu, or {_HIDE_CARDS}"
        return auto_device("trainer.device", advice, environ=environ, root=root)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"trainer.device: {error}") from error
    if device.type != "cuda":
        logger.info("computing on %s; torch %s", device, torch.__version__)
        return device
    facts = this_process(root)
    _require_card(name, device.index or 0, facts)
    _log(device, facts)
    return device


def auto_device(
    field: str, advice: str, *, environ: Mapping[str, str] = os.environ, root: Path = ROOT
) -> torch.device:
    """The first card, or the CPU on a machine without one.

    Args:
        field: that is to choose, for the message.
        advice: how to go on without the card.
        environ: CUDA_VISIBLE_DEVICES may hide the cards.
        root: where `dev` and `proc` are.

    Raises:
        ConfigError: this process has a card that torch cannot use.
    """
    facts = this_process(root)
    if facts.cards:
        device = torch.device("cuda", 0)
    elif visible_cards(environ, root).names and num_device_files(root):
        raise ConfigError(
            f"{field}: this machine has an NVIDIA card, but {facts.unusable() or 'CUDA shows none'}"
            f" (docs/gpu.md); {advice}"
        )
    else:
        device = torch.device("cpu")
    _log(device, facts)
    return device


def this_process(root: Path = ROOT) -> Facts:
    """What this process's torch finds."""
    return msgspec.convert(collect(memory=False, root=str(root)), Facts)


def _require_card(name: str, number: int, facts: Facts) -> None:
    if facts.problem:
        raise ConfigError(f"trainer.device is {name!r}, but {facts.unusable()}")
    if number >= len(facts.cards):
        count = len(facts.cards)
        raise ConfigError(
            f"trainer.device is {name!r}, but CUDA shows this process {count} cards, counted from 0"
        )


def _log(device: torch.device, facts: Facts) -> None:
    if device.type == "cuda":
        facts = msgspec.structs.replace(facts, cards=[facts.cards[device.index or 0]])
    logger.info("computing on %s; %s", device, facts)
