"""Commands whose output nobody can read, or not all of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.errors import ExitCode
from async_grpo.launch.standard_streams import say


def shell(
    script: str, config: Path, cwd: Path | None = None, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Run `script`, in which CHECK is `async-grpo check` with its configuration."""
    script = script.replace("CHECK", f"{sys.executable} -m async_grpo check '{config}'")
    return subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, timeout=50, cwd=cwd,
        env=os.environ | env,
    )  # fmt: skip


def test_text_that_the_terminal_does_not_know_is_escaped(config_path: Path) -> None:
    done = shell("CHECK run.output_dir=l\u00e4ufe", config_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "output_dir: l\\xe4ufe" in done.stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed: str, config_path: Path) -> None:
    done = shell(f"CHECK {closed}", config_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (">&-" not in closed.split())


def test_an_answer_that_finds_no_room_is_an_error(config_path: Path) -> None:
    done = shell("CHECK > /dev/full", config_path)
    assert done.returncode == ExitCode.OTHER
    assert done.stderr == (
        "async-grpo: standard output cannot be written: No space left on device\n"
    )


def test_a_current_directory_that_was_removed_is_told(config_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    package = f"{Path(__file__).resolve().parents[3]}"
    done = shell("rmdir ../folder && CHECK", config_path, cwd=folder, PYTHONPATH=package)
    assert done.returncode == ExitCode.CONFIG
    assert done.stderr.startswith("async-grpo: the current directory was removed")


def test_who_reads_no_more_misses_what_is_said() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        say("heard", stream)
        assert os.read(reader, 100) == b"heard\n"
        os.close(reader)
        for _ in range(2):
            say("not heard", stream)
        stream.write("neither")  # is written when the stream is closed
