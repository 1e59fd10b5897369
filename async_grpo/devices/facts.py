"""What an interpreter's torch says of itself and of the machine. Starts without torch."""

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from async_grpo.errors import ConfigError

ANSWER_S = 120.0
"""Deadline of an interpreter to import torch and to ask every card; some read it over a network."""
_PROGRAM = Path(__file__).with_name("probe.py")
_LEAST_DRIVER = {"12": 525, "13": 580}
"""First branch of the driver that runs programs of this major version of CUDA."""


class CardFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One card, as CUDA shows it."""

    name: str
    uuid: str = ""
    """without `GPU-`"""
    total_bytes: int
    free_bytes: int | None = None
    """None: not asked"""
    problem: str = ""
    """why its memory could not be asked for"""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What `devices.probe` found."""

    torch: str = ""
    cuda: str = ""
    """that torch was built for"""
    nccl: str = ""
    """empty: torch has none"""
    driver: str = ""
    problem: str = ""
    """why CUDA cannot be used; empty: it can"""
    cards: list[CardFacts] = []

    def __str__(self) -> str:
        parts = [f"torch {self.torch or 'none'}", f"CUDA {self.cuda or 'none'}"]
        parts += [f"NCCL {self.nccl or 'none'}", f"driver {self.driver or 'none'}"]
        return ", ".join([*parts, self._cards()])

    def _cards(self) -> str:
        names: dict[str, int] = {}
        for card in self.cards:
            name = f"{card.name} ({gib(card.total_bytes)})"
            names[name] = names.get(name, 0) + 1
        return ", ".join(f"{count} x {name}" for name, count in names.items()) or "no card"

    def unusable(self) -> str:
        """Why there is no CUDA, with the driver that is needed where that may be why."""
        text = f"torch {self.torch} cannot use CUDA: {self.problem}" if self.torch else self.problem
        least = _LEAST_DRIVER.get(self.cuda.partition(".")[0])
        branch = self.driver.partition(".")[0]
        if least and branch and int(branch) < least:
            text += (
                f"; the driver is {self.driver}, and torch for CUDA {self.cuda} needs branch "
                f"{least} or newer"
            )
        return text


def gib(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / 2**30:.1f} GiB"


class Asked:
    """An interpreter that was asked and has not answered yet: start several, then read each.

    Args:
        python: the interpreter.
        env: its environment.
        field: that named it, for messages.
        answer_s: its deadline.

    Raises:
        ConfigError: it cannot be started.
    """

    def __init__(
        self, python: str, env: Mapping[str, str], field: str, *, answer_s: float = ANSWER_S
    ) -> None:
        self._python, self._field, self._answer_s = python, field, answer_s
        self._deadline = time.monotonic() + answer_s
        program = _PROGRAM.read_text(encoding="utf-8")
        try:
            self._process = subprocess.Popen(
                [python, "-c", program],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise ConfigError(f"{field}: cannot run {python}: {error.strerror}") from error

    def answer(self) -> Facts:
        """What it said.

        Raises:
            ConfigError: it failed, or did not answer in time.
        """
        whom = f"{self._field}: {self._python}"
        try:
            left_s = max(0.0, self._deadline - time.monotonic())
            answer, errors = self._process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"{whom} did not tell its torch and its cards within {self._answer_s:g} s"
            ) from error
        finally:
            self.end()
        lines = answer.strip().splitlines()
        try:
            return msgspec.json.decode(lines[-1] if lines else "", type=Facts)
        except msgspec.DecodeError as error:
            said = (errors.strip() or answer.strip()).splitlines()
            what = said[-1] if said else f"no answer, exit code {self._process.returncode}"
            raise ConfigError(f"{whom} cannot tell its torch and its cards: {what}") from error

    def end(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
