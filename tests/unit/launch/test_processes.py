"""Child processes, and the orphans of children."""

import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.launch.processes import RoleCommand, RoleProcess, describe_exit

ORPHAN_MAKER = """
import os, subprocess, sys, time
from async_grpo.launch.processes import adopt_orphans, end_orphans
adopt_orphans()
{source}
killed = end_orphans(0.2)
left = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
print(killed, left)
"""


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "was killed by SIGKILL"),
        (2, "ended with exit code 2 (configuration)"),
        (3, "ended with exit code 3 (a peer or a deadline)"),
        (17, "ended with exit code 17"),
    ],
)
def test_an_exit_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text


async def test_the_log_holds_both_streams_and_survives_a_restart(tmp_path: Path) -> None:
    source = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    command = RoleCommand("role", [sys.executable, "-S", "-c", source], tmp_path / "l" / "role.log")
    for _ in range(2):
        process = RoleProcess(command)
        assert await process.wait() == 0
    assert process.tail() == "out\nerr\nout\nerr"
    assert process.tail(num_lines=1) == "err"


async def test_env_is_on_top_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    source = "import os; print(os.environ['KEPT'], os.environ['ADDED'])"
    args = [sys.executable, "-S", "-c", source]
    process = RoleProcess(RoleCommand("role", args, tmp_path / "log", {"ADDED": "2"}))
    assert await process.wait() == 0
    assert process.tail() == "1 2"


def run_orphan_maker(source: str) -> str:
    code = ORPHAN_MAKER.format(source=source)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_stubborn_grandchild_is_adopted_and_killed() -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    parent = (
        "import subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-S', '-c', {stubborn!r}], start_new_session=True)"
    )
    assert run_orphan_maker(f"subprocess.run([sys.executable, '-c', {parent!r}])") == "1 []"


def test_a_grandchild_that_ends_by_itself_is_awaited() -> None:
    parent = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', 'pass'])"
    assert run_orphan_maker(f"subprocess.run([sys.executable, '-c', {parent!r}])") == "0 []"


def test_no_children_is_no_error() -> None:
    assert run_orphan_maker("pass") == "0 []"
