"""Roles of one run that are started by hand, as in several terminals."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from real_run import CONFIG, command_line, descendants_of

from async_grpo.config.run_directory import RunDirectory


class Terminals:
    """Roles of one run, each started by itself.

    Args:
        root: folder of everything.
        model: the policy.
        address: of the replay server; a free one of this machine by default.
    """

    def __init__(self, root: Path, model: Path, address: str = "") -> None:
        self.root = root
        self.directory = RunDirectory(root / "run")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        address = address or free_address()
        text = CONFIG.format(root=root, model=model, num_steps=3)
        (root / "config.yaml").write_text(
            text.replace("tcp://127.0.0.1:0", address).replace("timeout_s: 60", "timeout_s: 150")
        )

    def start(self, role: str, *args: str, name: str = "", prefix: Sequence[str] = ()) -> None:
        """`prefix` is a command that runs the role."""
        name = name or role
        command = [*prefix, sys.executable, "-m", "async_grpo", role]
        command += [str(self.root / "config.yaml"), *args]
        with (self.root / f"{name}.output").open("wb") as output:
            # a session of its own, as each terminal has
            self.processes[name] = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True
            )

    def ctrl_c(self, name: str) -> int:
        """As the terminal sends it, to all processes in the foreground; the exit code."""
        process = self.processes[name]
        children = descendants_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(60)
        del self.processes[name]
        deadline = time.monotonic() + 5.0  # theirs, to notice that their parent is gone
        while left_over := [line for pid in children if (line := command_line(pid))]:
            assert time.monotonic() < deadline, (left_over, self.output(name))
            time.sleep(0.05)
        return code

    def output(self, name: str) -> str:
        return (self.root / f"{name}.output").read_text(errors="replace")

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 150.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            for name, process in self.processes.items():
                assert process.poll() in (None, 0), f"{name}\n{self.output(name)}"
            assert time.monotonic() < deadline, f"no {what}\n{self.everything()}"
            time.sleep(0.05)

    def everything(self) -> str:
        return "\n".join(f"== {name}\n{self.output(name)[-3000:]}" for name in self.processes)

    def finish(self, timeout_s: float = 200.0) -> None:
        deadline = time.monotonic() + timeout_s
        for name, process in self.processes.items():
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"{name} did not end\n{self.everything()}")
            assert code == 0, f"{name} ended with {code}\n{self.output(name)}"

    def num_steps(self) -> int:
        path = self.directory.metrics
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def end(self) -> None:
        """Whoever is still there."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def free_address() -> str:
    """A port that nobody has, for roles that must know it before they start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
