"""A machine with NVIDIA cards, as far as files tell; interpreters that say what one wants."""

import json
import sys
from pathlib import Path
from typing import Any

GIB = 1 << 30


def make_machine(root: Path, num_cards: int, driver: str = "580.65.06") -> Path:
    """`root` with the files of a driver and of cards that a process may open."""
    (root / "dev").mkdir(parents=True)
    for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{card}" for card in range(num_cards))]:
        (root / "dev" / name).touch()
    version = root / "proc" / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    version.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue Mar  5\n")
    for card in range(num_cards):
        (version.parent / "gpus" / f"0000:{card:02x}:00.0").mkdir(parents=True)
    return root


def card(number: int, *, total_gib: float = 80, free_gib: float = 79) -> dict[str, Any]:
    """One card of an interpreter's answer."""
    return {
        "name": "NVIDIA H100",
        "uuid": f"{number:08x}-0000",
        "total_bytes": int(total_gib * GIB),
        "free_bytes": int(free_gib * GIB),
    }


def answer(num_cards: int, *, torch: str = "2.14.1+cu130", nccl: str = "2.30.7") -> dict[str, Any]:
    """What `devices.probe` prints on a sound machine."""
    cards = [card(number) for number in range(num_cards)]
    return {
        "torch": torch, "cuda": "13.0", "nccl": nccl, "driver": "580.65.06", "cards": cards,
    }  # fmt: skip


def make_interpreter(path: Path, text: str) -> str:
    """A program that runs `text`, whatever it is asked."""
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return str(path)


def answering(path: Path, said: dict[str, Any]) -> str:
    """An interpreter that gives this answer, and notes its environment beside it."""
    note = f"import json, os; open({f'{path}.env'!r}, 'w').write(json.dumps(dict(os.environ)))"
    return make_interpreter(path, f"{note}\nprint('a warning')\nprint({json.dumps(said)!r})")
