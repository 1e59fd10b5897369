"""A model that is barely warmed up, and a run that uses it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_run import RealRun


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_reaches_children() -> None:
    """A shell that starts the tests in the background ignores SIGINT, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is barely warmed up, made in a process of its own."""
    directory = tmp_path_factory.mktemp("toy") / "model"
    options = {"length": 3, "alphabet": "abcd", "gate": 0.02, "max_steps": 60, "num_held_out": 8}
    code = (
        "import json, pathlib, sys\n"
        "from async_grpo.training.toy import make_toy_model\n"
        "make_toy_model(pathlib.Path(sys.argv[1]), 0, json.loads(sys.argv[2]))\n"
    )
    args = [sys.executable, "-c", code, str(directory), json.dumps(options)]
    subprocess.run(args, check=True, timeout=300, capture_output=True)
    return directory


@pytest.fixture
def real_run(tmp_path: Path, toy_model: Path) -> Iterator[RealRun]:
    run = RealRun(tmp_path, toy_model)
    yield run
    if run.process is not None and run.process.poll() is None:
        # Its children hold its pipe as stdin and end with it.
        run.process.kill()
        run.process.wait(10)
