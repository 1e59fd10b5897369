"""Which cards a configuration names, and what it may not say of them. Knows no machine."""

from collections import Counter
from collections.abc import Iterator

from async_grpo.config.engine import LOOPBACK, EngineKind, EngineSection
from async_grpo.config.schema import Config
from async_grpo.config.weights import Backend, Transport

_NAMES = ("GPU-", "MIG-")
INSTEAD = "set weights.backend=gloo, or weights.transport=http or disk"
"""What works where NCCL does not."""


def trainer_card(device: str) -> int | None:
    """Position of `trainer.device` among the cards that the trainer sees; None: it is no card.

    `auto` counts as the first: that is what it becomes where there is one.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cuda"):
        return None
    return int(number) if number.isdecimal() else 0


def server_flag(engine: EngineSection, flag: str) -> str:
    """The last value of `flag` in `engine.server_args`, as `--flag=value` or as two items."""
    value, arguments = "", engine.server_args
    for position, argument in enumerate(arguments):
        name, equals, after = argument.partition("=")
        if name == flag:
            value = after if equals else "".join(arguments[position + 1 : position + 2])
    return value


def starts_on_cards(engine: EngineSection) -> bool:
    """Whether SGLang servers are started that compute on NVIDIA cards."""
    sglang = engine.kind == EngineKind.sglang and not engine.urls
    return sglang and server_flag(engine, "--device") in ("", "cuda")


def cards_of(devices: str) -> list[str]:
    """The items of one entry of `engine.device_ids`."""
    return [item.strip() for item in devices.split(",")] if devices else []


def card_problems(config: Config) -> Iterator[str]:
    """Cards that cannot be shared, by their names alone."""
    engine = config.engine
    if engine.urls:
        return
    for devices in engine.device_ids:
        for item in cards_of(devices) or [""] * (engine.kind == EngineKind.sglang):
            if not item.isdecimal() and not item.startswith(_NAMES):
                yield (
                    f"engine.device_ids: {item!r} (in {devices!r}) is no card: give its number, or "
                    "its name, GPU-... or MIG-..."
                )
        twice = sorted(card for card, count in Counter(cards_of(devices)).items() if count > 1)
        if twice:
            yield f"engine.device_ids: {devices!r} names card {twice[0]} twice"
    if config.weights.backend is not Backend.nccl or not _broadcasts(config):
        return
    if config.weights.engines_per_cell > 1:
        for card in _of_two_engines(engine):
            yield (
                f"engine.device_ids: two engines have card {card}, and NCCL refuses a shared card "
                "within a cell: give each its own, set weights.engines_per_cell=1, or "
                f"{INSTEAD}"
            )
    # with another host the file may be of several machines, each with a card of that number
    if config.weights.host.startswith(LOOPBACK):
        yield from _trainer_shares(config)


def card_warnings(config: Config) -> Iterator[str]:
    """Cards that two engines share; each then needs a small share of the memory."""
    nccl = config.weights.backend is Backend.nccl and config.weights.engines_per_cell > 1
    if config.engine.urls or (nccl and _broadcasts(config)):
        return
    for card in _of_two_engines(config.engine):
        yield (
            f"engine.device_ids: two engines have card {card}; each takes its "
            "--mem-fraction-static of the memory that is free when it starts"
        )


def _trainer_shares(config: Config) -> Iterator[str]:
    card = trainer_card(config.trainer.device)
    shared = "CUDA_VISIBLE_DEVICES" not in config.engine.environment and any(
        str(card) in cards_of(devices) for devices in config.engine.device_ids
    )
    if shared:
        yield (
            f"engine.device_ids: card {card} is the trainer's too (trainer.device="
            f"{config.trainer.device}), and NCCL refuses a shared card: name another, or {INSTEAD}"
        )


def _of_two_engines(engine: EngineSection) -> list[str]:
    owners = Counter(card for ids in engine.device_ids for card in set(cards_of(ids)))
    return sorted(card for card, count in owners.items() if count > 1)


def _broadcasts(config: Config) -> bool:
    return Transport.broadcast in config.weights.transports()
