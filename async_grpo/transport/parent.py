"""No orphans: a child holds its parent's pipe as stdin and exits when the pipe closes.

The operating system closes the pipe however the parent ends, `kill -9` included, so no signal, no
heartbeat and no list of process ids is needed. Knows nothing of roles.
"""

import asyncio
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from async_grpo.errors import ExitCode

CHILD_VARIABLE = "ASYNC_GRPO_CHILD"
_STDIN = 0

Output = int | IO[bytes] | IO[str] | None


def start_child(
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: Output = None,
    stderr: Output = None,
    new_session: bool = True,
) -> "subprocess.Popen[bytes]":
    """Start a process that ends when this one does, if it calls `exit_with_parent`.

    Its stdin stays open as long as the returned handle (do not write to it, do not close it).

    Args:
        args: program and arguments.
        env: its environment; None: this process's.
        stdout: as for `subprocess.Popen`.
        stderr: as for `subprocess.Popen`.
        new_session: a Ctrl-C at the terminal then reaches the parent only.
    """
    return subprocess.Popen(
        args,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=_child_environment(env),
        start_new_session=new_session,
    )


async def start_child_async(
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: Output = None,
    stderr: Output = None,
    new_session: bool = True,
) -> asyncio.subprocess.Process:
    """`start_child` for an event loop: its output can be awaited."""
    return await asyncio.create_subprocess_exec(
        *args,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=_child_environment(env),
        start_new_session=new_session,
    )


def exit_with_parent() -> None:
    """If this process was started by `start_child`, end it with exit code 3 when its parent ends.

    Called once, early, by every role. The variable that marks a child is removed, so that programs
    this one starts by other means do not take their own stdin for a parent's pipe.
    """
    if os.environ.pop(CHILD_VARIABLE, None) != "1":
        return
    threading.Thread(target=_exit_at_end_of_stdin, name="exit-with-parent", daemon=True).start()


def _exit_at_end_of_stdin() -> None:
    while os.read(_STDIN, 4096):
        pass
    os._exit(ExitCode.PEER)


def _child_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    return {**(os.environ if env is None else env), CHILD_VARIABLE: "1"}
