"""Real processes: a child must not outlive its parent, however the parent ends."""

import asyncio
import os
import select
import signal
import subprocess
import sys

from async_grpo.transport.parent import CHILD_VARIABLE, start_child, start_child_async

CHILD = """
import os, signal
from async_grpo.transport.parent import exit_with_parent
exit_with_parent()
print("ready", "ASYNC_GRPO_CHILD" in os.environ, flush=True)
signal.pause()
"""

PARENT = f"""
import signal, sys
from async_grpo.transport.parent import start_child
child = start_child([sys.executable, "-c", {CHILD!r}])
print(child.pid, flush=True)
signal.pause()
"""


def test_child_exits_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = {parent.stdout.readline().split()[0] for _ in range(2)}
    child_pid = int((lines - {"ready"}).pop())
    child = os.pidfd_open(child_pid)
    try:
        parent.kill()
        assert parent.wait(timeout=20) == -signal.SIGKILL
        # end of file on stdout: the child, the last holder of the pipe, is gone
        assert parent.stdout.read() == ""
        poller = select.poll()
        poller.register(child, select.POLLIN)
        assert poller.poll(20_000), "the child outlives its parent"
    finally:
        os.close(child)
        parent.stdout.close()


def test_child_lives_while_its_parent_does_and_exits_with_peer_code():
    child = start_child([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"ready False\n"
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(timeout=20) == 3
    child.stdout.close()


async def test_async_variant_marks_the_child():
    program = f"import os; print(os.environ[{CHILD_VARIABLE!r}])"
    child = await start_child_async([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    async with asyncio.timeout(20):
        assert await child.stdout.readline() == b"1\n"
        assert await child.wait() == 0


def test_a_process_that_is_nobodys_child_ignores_its_stdin():
    program = (
        "from async_grpo.transport.parent import exit_with_parent\n"
        "import threading\n"
        "exit_with_parent()\n"
        "assert threading.active_count() == 1\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != CHILD_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, env=environment, timeout=20
    )
    assert done.returncode == 0
