"""The collective library of the weight broadcast, where `weights.backend` leaves it open.

NCCL moves weights from card to card, but refuses two ranks on one card. Gloo goes through host
memory and works everywhere. So `auto` takes NCCL only where the configuration shows that trainer
and engines compute on cards of their own.
"""

import logging
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from async_grpo.config.devices import cards_of, server_flag
from async_grpo.config.engine import EngineKind
from async_grpo.config.schema import Config
from async_grpo.config.weights import Backend, Transport, WeightsSection
from async_grpo.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the choice depends on."""

    trainer_card: int | None
    """position of the trainer's card among those that it sees; None: it computes on the CPU"""
    num_cards: int
    """that it sees"""
    has_nccl: bool
    """torch was built with it"""
    kind: str
    """`engine.kind`"""
    attached: bool
    """engines run already (`engine.urls`)"""
    server_device: str
    """`--device` of servers that are started; empty: their default, a card"""
    device_ids: tuple[str, ...]
    """`engine.device_ids`; empty: engines are placed beside the trainer"""


def why_not_nccl(around: Surroundings) -> str:
    """Why `auto` means gloo here; empty: it means nccl."""
    if around.trainer_card is None:
        return "the trainer computes on the CPU"
    if not around.has_nccl:
        return "the trainer's torch has no NCCL"
    if around.attached:
        return "nothing is known of the devices of engines that run already (engine.urls)"
    if around.kind != EngineKind.sglang:
        return f"an engine of kind {around.kind} may share the trainer's card"
    if around.server_device not in ("", "cuda"):
        return f"engines compute on another device (--device={around.server_device})"
    if not around.device_ids:
        return "" if around.num_cards > 1 else "trainer and engines have one card"
    for ids in around.device_ids:
        cards = cards_of(ids)
        if str(around.trainer_card) in cards:
            return f"card {around.trainer_card} is the trainer's and an engine's"
        if named := [card for card in cards if not card.isdecimal()]:
            return f"card {named[0]} of engine.device_ids may be the trainer's"
    return ""


def settings_in_force(config: Config, device: torch.device) -> WeightsSection:
    """Section `weights` with the backend chosen; says in the log which, and why.

    Args:
        config: of the run.
        device: that the trainer computes on.

    Raises:
        ConfigError: `weights.backend` is nccl, and this process cannot use it.
    """
    settings = config.weights
    if Transport.broadcast not in settings.transports() or settings.backend is Backend.gloo:
        return settings
    around = surroundings(config, device)
    if settings.backend is Backend.nccl:
        if around.trainer_card is None or not around.has_nccl:
            raise ConfigError(
                f"weights.backend is nccl, but {why_not_nccl(around)}; set weights.backend=gloo"
            )
        return settings
    reason = why_not_nccl(around)
    chosen = Backend.gloo if reason else Backend.nccl
    because = reason or "trainer and engines have cards of their own"
    advice = ""
    if reason and around.trainer_card is not None and around.has_nccl:
        advice = " (weights.backend=nccl is faster, if no engine computes on the trainer's card)"
    logger.info("weights travel over %s: %s%s", chosen.value, because, advice)
    return replace(settings, backend=chosen)


def surroundings(config: Config, device: torch.device) -> Surroundings:
    """As this process and the configuration know them."""
    on_card = device.type == "cuda"
    engine = config.engine
    return Surroundings(
        trainer_card=(device.index or 0) if on_card else None,
        num_cards=torch.cuda.device_count() if on_card else 0,
        has_nccl=dist.is_nccl_available(),
        kind=engine.kind,
        attached=bool(engine.urls),
        server_device=server_flag(engine, "--device"),
        device_ids=tuple(engine.device_ids),
    )
