"""A real run in a folder of its own: start it, find its processes, hurt them, read what it left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from async_grpo.analysis.audit import AuditReport, audit
from async_grpo.config.run_directory import RunDirectory

CONFIG = """
run: {{output_dir: {root}/run, num_train_steps: {num_steps}, no_progress_timeout_s: 60}}
policy: {{model: {model}}}
task: {{name: reverse, options: {{length: 3, alphabet: abcd}}}}
generation: {{group_size: 4, max_new_tokens: 5}}
engine: {{context_length: 32, max_running_requests: 32}}
replay:
  address: tcp://127.0.0.1:0
  groups_per_step: 8
  max_bytes: 16777216
  heartbeat_s: 0.5
  peer_timeout_s: 3
staleness: {{max_staleness: 4}}
algorithm: {{zero_variance: keep}}
trainer: {{lr: 3.0e-4}}
metrics: {{tensorboard: false}}
launch: {{status_s: 1}}
"""


@dataclass
class RealRun:
    """One `async-grpo run` and its run directory."""

    root: Path
    model: Path
    process: "subprocess.Popen[bytes] | None" = None
    seen: set[int] = field(default_factory=set)

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.root / "run")

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    def write_config(self, *, num_steps: int) -> None:
        text = CONFIG.format(root=self.root, model=self.model, num_steps=num_steps)
        self.config.write_text(text)

    def start(self, *overrides: str, num_steps: int) -> None:
        self.write_config(num_steps=num_steps)
        args = [sys.executable, "-m", "async_grpo", "run", str(self.config), *overrides]
        with (self.root / "output").open("wb") as output:
            self.process = subprocess.Popen(
                args,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.root,  # where it finds modules of its own
            )

    def finish(self, timeout_s: float = 150.0) -> int:
        """Wait for the end; the exit code."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {timeout_s} s\n{self.output()}")

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def output(self) -> str:
        return (self.root / "output").read_text(errors="replace")

    def steps(self) -> list[dict[str, Any]]:
        path = self.directory.metrics
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1] if line]

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> Any:
        """Watch files and processes, which have no events for us, until `condition`."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not (result := condition()):
            if self.process.poll() is not None:
                pytest.fail(f"the run ended before {what}\n{self.output()}")
            if time.monotonic() > deadline:
                pytest.fail(f"no {what} within {timeout_s} s\n{self.output()}")
            self.seen |= set(self.descendants())
            time.sleep(0.05)
        return result

    def until_step(self, number: int) -> None:
        self.until(lambda: len(self.steps()) >= number, f"step {number}")

    def descendants(self) -> list[int]:
        assert self.process is not None
        return descendants_of(self.process.pid)

    def pid_of(self, role: str) -> int:
        """The process whose command line has `role` as its subcommand."""
        pids = [pid for pid in self.descendants() if role in command_line(pid)[:4]]
        assert len(pids) == 1, f"{role}: {pids}"
        return pids[0]

    def kill(self, role: str) -> int:
        pid = self.pid_of(role)
        os.kill(pid, signal.SIGKILL)
        return pid

    def audit(self) -> AuditReport:
        return audit(self.directory.root)

    def left_over(self) -> list[str]:
        """Processes of the run that outlived it."""
        return [" ".join(command_line(pid)) for pid in self.seen if command_line(pid)]


def descendants_of(ancestor: int) -> list[int]:
    """Its children, their children, ..."""
    found, todo = [], [ancestor]
    while todo:
        pid = todo.pop()
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                children = [int(child) for child in listing.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
            found += children
            todo += children
    return found


def command_line(pid: int) -> list[str]:
    """Its arguments; empty when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rstrip("\0").split("\0") if text else []
