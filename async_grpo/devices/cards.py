"""Which NVIDIA cards a process sees, and which the engines of a run get. Asks no CUDA.

CUDA_VISIBLE_DEVICES of a process is its list of cards: numbers, or names (`GPU-...`, `MIG-...`).
What CUDA then calls card 0 is the first of the list. A configuration counts in that way too, so its
numbers are looked up in the list before they become the list of an engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_grpo.config.devices import cards_of, starts_on_cards, trainer_card
from async_grpo.config.engine import EngineSection
from async_grpo.config.schema import Config
from async_grpo.errors import ConfigError

ROOT = Path("/")
VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Cards:
    """The cards that a process sees, in CUDA's order."""

    names: tuple[str, ...]
    """as CUDA_VISIBLE_DEVICES would name them; empty: none, or none that we know of"""
    variable: str | None
    """the variable's value; None: it is not set, and all of the machine's are seen"""

    def __str__(self) -> str:
        whose = "this machine" if self.variable is None else f"{VARIABLE}={self.variable}"
        return f"the {_cards(len(self.names))} of {whose}"

    def look_up(self, devices: str, engine: str) -> str:
        """CUDA_VISIBLE_DEVICES of a child, for an entry of `engine.device_ids`.

        Args:
            devices: cards by their position here, or by name.
            engine: names it in the message.

        Raises:
            ConfigError: a position is beyond these cards.
        """
        return ",".join(self._name(item, engine) for item in cards_of(devices))

    def _name(self, item: str, engine: str) -> str:
        if not item.isdecimal() or (not self.names and self.variable is None):
            return item
        if int(item) >= len(self.names):
            raise ConfigError(
                f"engine.device_ids: card {item} of {engine} is beyond {self}; numbers count from "
                "0 among them"
            )
        return self.names[int(item)]


def _cards(count: int) -> str:
    return f"{count} card{'' if count == 1 else 's'}"


def visible_cards(environ: Mapping[str, str], root: Path = ROOT) -> Cards:
    """The cards that a process with these variables sees.

    Args:
        environ: its environment.
        root: where `dev` and `proc` are.
    """
    variable = environ.get(VARIABLE)
    if variable is None:
        count = num_device_files(root) or _num_known_to_the_kernel(root)
        return Cards(tuple(str(number) for number in range(count)), None)
    names: list[str] = []
    for item in cards_of(variable):
        if not item or item == "-1":
            break  # CUDA ignores this one and what follows
        names.append(item)
    return Cards(tuple(names), variable)


def num_device_files(root: Path = ROOT) -> int:
    """NVIDIA cards that this process may open, the container's for instance."""
    return sum(path.name[6:].isdecimal() for path in (root / "dev").glob("nvidia*"))


def _num_known_to_the_kernel(root: Path) -> int:
    """Cards of a machine on which no program has used one yet: then they have no files."""
    return sum(1 for _ in (root / "proc/driver/nvidia/gpus").glob("*"))


def engine_cards(engine: EngineSection, environ: Mapping[str, str], root: Path = ROOT) -> Cards:
    """The cards among which `engine.device_ids` counts."""
    return visible_cards({**environ, **engine.environment}, root)


def place_engines(
    config: Config,
    environ: Mapping[str, str],
    *,
    trainer_here: bool,
    num_generators: int = 1,
    root: Path = ROOT,
) -> list[list[str]]:
    """`engine.device_ids` of each generator on this machine, where none are given.

    Slices of `tensor_parallel_size` of the cards that are not the trainer's, in order.

    Args:
        config: whose engines.
        environ: of the processes that start them.
        trainer_here: whether the trainer is on this machine.
        num_generators: of this machine.
        root: where `dev` and `proc` are.

    Returns:
        Empty lists where engines are not placed: they are no SGLang on cards, or are one rank on a
        machine of which no card is known.

    Raises:
        ConfigError: too few cards; says how many there are.
    """
    section = config.engine
    if section.device_ids or not starts_on_cards(section):
        return [list(section.device_ids) for _ in range(num_generators)]
    size, count = section.tensor_parallel_size, section.num_engines * num_generators
    cards = engine_cards(section, environ, root)
    if not cards.names and cards.variable is None and size * count == 1:
        return [[]]
    taken = _trainers(config, environ, root) if trainer_here else ""
    free = [str(position) for position, name in enumerate(cards.names) if name != taken]
    if len(free) < size * count:
        raise ConfigError(_too_few(config, cards, len(free), num_generators))
    slices = [",".join(free[size * index : size * (index + 1)]) for index in range(count)]
    per = section.num_engines
    return [slices[per * index : per * (index + 1)] for index in range(num_generators)]


def _trainers(config: Config, environ: Mapping[str, str], root: Path) -> str:
    """The trainer's card by the name that CUDA_VISIBLE_DEVICES has for it; empty: none."""
    position, names = trainer_card(config.trainer.device), visible_cards(environ, root).names
    return names[position] if position is not None and position < len(names) else ""


def _too_few(config: Config, cards: Cards, num_free: int, num_generators: int) -> str:
    section = config.engine
    needed = section.num_engines * section.tensor_parallel_size * num_generators
    factors = [f"engine.num_engines ({section.num_engines})"]
    if section.tensor_parallel_size > 1:
        factors.append(f"engine.tensor_parallel_size ({section.tensor_parallel_size})")
    if num_generators > 1:
        factors.append(f"launch.num_generators ({num_generators})")
    beside = " beside the trainer's" if num_free < len(cards.names) else ""
    return (
        f"{' * '.join(factors)}: engines need {_cards(needed)}{beside}, and {num_free} of {cards} "
        "are left: start fewer, name cards in engine.device_ids, or add --device=cpu to "
        "engine.server_args; docs/gpu.md tells how one card is shared with the trainer"
    )


def look_up_all(
    device_ids: Sequence[str], engine: EngineSection, environ: Mapping[str, str], root: Path = ROOT
) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine.

    Raises:
        ConfigError: a card is not there.
    """
    cards = engine_cards(engine, environ, root)
    return [cards.look_up(devices, f"engine {slot}") for slot, devices in enumerate(device_ids)]


def placement(
    config: Config, environ: Mapping[str, str], *, trainer_here: bool, root: Path = ROOT
) -> str:
    """Who computes where, as `run` on this machine would have it; for people."""
    section = config.engine
    trainer = trainer_card(config.trainer.device)
    cards = engine_cards(section, environ, root)
    whose = f"trainer on {config.trainer.device}" if trainer is None else f"trainer {trainer}"
    if not trainer_here:
        whose = "trainer elsewhere"
    if not section.device_ids and not cards.names and cards.variable is None:
        return (
            f"{whose}; engines {section.tensor_parallel_size} each of the others, in order; "
            "this machine has none"
        )
    try:
        placed = place_engines(
            config,
            environ,
            trainer_here=trainer_here,
            num_generators=config.launch.num_generators,
            root=root,
        )
        device_ids = [devices for generator in placed for devices in generator]
        names = look_up_all(device_ids, section, environ, root)
    except ConfigError as error:
        return f"a start on this machine would be refused: {error}"
    seen = f" of {cards}" if cards.names else "; this machine has none"
    if (own := _trainers(config, environ, root)) and trainer_here:
        whose = f"trainer {own}"
    return f"{whose}; engines {' | '.join(names) or 'as their generator'}{seen}"
