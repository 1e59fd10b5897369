"""One child process per role: start, wait, stop, the tail of its log; and orphans, to the last.

Linux only (pidfd, /proc, sub-reaper). Knows nothing of what roles do, nor of restarts.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from async_grpo.errors import ExitCode
from async_grpo.transport.parent import start_child

_PR_SET_CHILD_SUBREAPER = 36
_MEANINGS: dict[int, str] = {
    ExitCode.CONFIG: "configuration",
    ExitCode.PEER: "a peer or a deadline",
    ExitCode.NUMERICS: "numerics",
}


@dataclass(frozen=True)
class RoleCommand:
    """How to start one role."""

    name: str
    args: list[str]
    log: Path
    """stdout and stderr are appended here"""
    env: dict[str, str] = field(default_factory=dict)
    """on top of our own environment"""


class RoleProcess:
    """A running role: the leader of its own session and process group.

    Needs a running event loop; one task per loop may await `wait` at any time, any number of times.
    """

    def __init__(self, command: RoleCommand) -> None:
        self.command = command
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log:
            self._popen = start_child(
                command.args, env=os.environ | command.env, stdout=log, stderr=subprocess.STDOUT
            )
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def name(self) -> str:
        """Name of the role."""
        return self.command.name

    @property
    def running(self) -> bool:
        """It has not been reaped."""
        return not self._exited.done()

    async def wait(self) -> int:
        """The exit code once it has ended; -N for a signal. The caller sets the deadline."""
        return await asyncio.shield(self._exited)

    def terminate(self) -> None:
        """Ask for a clean stop. The role ends its own children."""
        if self.running:
            self._popen.terminate()

    def kill(self) -> None:
        """End it and its process group at once."""
        if self.running:
            os.killpg(self._popen.pid, signal.SIGKILL)

    def tail(self, num_lines: int = 15, num_bytes: int = 8192) -> str:
        """The end of its log."""
        with self.command.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - num_bytes))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # While the leader is a zombie its number cannot be reused: end what is left of the group.
        os.killpg(self._popen.pid, signal.SIGKILL)
        self._exited.set_result(self._popen.wait())
        if self._popen.stdin is not None:
            self._popen.stdin.close()


async def wait_all(
    processes: Iterable[RoleProcess], timeout_s: float, hurry: asyncio.Event
) -> bool:
    """Wait until all have ended, `timeout_s` has passed or `hurry` is set; True if all ended."""
    waits = [asyncio.ensure_future(process.wait()) for process in processes if process.running]
    if not waits:
        return True
    everyone = asyncio.ensure_future(asyncio.wait(waits))
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait({everyone, hurried}, timeout=timeout_s, return_when="FIRST_COMPLETED")
    ended = all(wait.done() for wait in waits)
    for task in (everyone, hurried, *waits):
        task.cancel()
    return ended


def describe_exit(code: int) -> str:
    """What an exit code of a role means, in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    meaning = _MEANINGS.get(code)
    return f"ended with exit code {code}" + (f" ({meaning})" if meaning else "")


def adopt_orphans() -> None:
    """From now on a grandchild whose parent dies becomes our child, so that it can be ended.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_orphans(grace_s: float) -> int:
    """Reap every child of this process; those that live on after `grace_s` are killed.

    An engine whose generator is gone ends by itself, at the end of its stdin; this waits for it.

    Returns:
        How many had to be killed.
    """
    deadline = time.monotonic() + grace_s
    killed: set[int] = set()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return len(killed)
        if pid:
            continue
        if time.monotonic() > deadline:
            for child in set(_children()) - killed:
                os.kill(child, signal.SIGKILL)
                killed.add(child)
        time.sleep(0.01)  # the kernel offers no event for "any child" beside SIGCHLD


def _children() -> list[int]:
    return [
        int(pid)
        for listing in Path("/proc/self/task").glob("*/children")
        for pid in listing.read_text().split()
    ]
