"""Ctrl-C at a real terminal: once ends a run in order, twice at once; nothing is left behind."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from real_run import RealRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

AT_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Makes stdin the controlling terminal, so that it turns a ^C into SIGINT, then becomes the run."""


class Terminal:
    """A pseudo-terminal with one `async-grpo run` in its foreground."""

    def __init__(self, run: RealRun) -> None:
        self.run = run
        run.write_config(num_steps=100_000)
        self._keyboard, screen = pty.openpty()
        args = ["-m", "async_grpo", "run", str(run.config)]
        run.process = subprocess.Popen(
            [sys.executable, "-c", AT_THE_TERMINAL, *args, "trainer.checkpoint_every=0"],
            stdin=screen, stdout=screen, stderr=screen, start_new_session=True,
        )  # fmt: skip
        os.close(screen)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        """Keep the terminal's buffer empty; its end comes with the last process that holds it."""
        with (self.run.root / "output").open("wb") as output, contextlib.suppress(OSError):
            while text := os.read(self._keyboard, 65536):
                output.write(text)
                output.flush()

    def ctrl_c(self) -> None:
        os.write(self._keyboard, b"\x03")

    def close(self) -> None:
        assert self.run.process is not None
        if self.run.process.poll() is None:
            self.run.process.kill()
            self.run.process.wait(10)
        self._reader.join(10)
        os.close(self._keyboard)


@pytest.fixture
def terminal(real_run: RealRun) -> Iterator[Terminal]:
    found = Terminal(real_run)
    yield found
    found.close()


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Twice as many processes that compute as there are cores."""
    spin = [sys.executable, "-c", "while True: pass"]
    spinners = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    yield
    for spinner in spinners:
        spinner.kill()
        spinner.wait(10)


def test_one_ctrl_c_ends_a_run_in_order_on_a_busy_machine(
    terminal: Terminal, busy_machine: None
) -> None:
    run = terminal.run
    run.until_step(3)
    terminal.ctrl_c()
    began = time.monotonic()
    assert run.finish(60) == 130, run.output()
    seconds = time.monotonic() - began
    assert seconds < 10.0, run.output()
    assert run.left_over() == []
    text = run.output()
    for part in ("stopping, within 10 s", "interrupted by Ctrl-C; summary of", "async-grpo audit"):
        assert part in text, text
    assert "Traceback" not in text
    assert run.audit().ok


def test_two_end_it_at_once(terminal: Terminal) -> None:
    run = terminal.run
    run.until_step(2)
    # the replay server does not answer: to stop in order would take the whole time limit
    server = run.pid_of("replay")
    os.kill(server, signal.SIGSTOP)
    terminal.ctrl_c()
    run.until(lambda: "stopping, within 10 s" in run.output(), "an answer to Ctrl-C")
    terminal.ctrl_c()
    began = time.monotonic()
    assert run.finish(60) == 130, run.output()
    assert time.monotonic() - began < 6.0, "the time limit of the workers' part of a stop"
    assert run.left_over() == []
    assert "Traceback" not in run.output()
    assert run.audit().ok
