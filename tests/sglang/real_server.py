"""Real SGLang servers on this machine's CPU, started by tools/sglang_cpu/serve.py."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from async_grpo.config.engine_keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, EngineKeys
from async_grpo.transport.parent import start_child

REPOSITORY = Path(__file__).parents[2]
SERVE = REPOSITORY / "tools" / "sglang_cpu" / "serve.py"
PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"
NO_KEYS = EngineKeys()
REQUIRED = "ASYNC_GRPO_REQUIRE_SGLANG"
"""Set where a missing environment is a failure: in CI."""


@dataclass(frozen=True)
class RealServer:
    """One server that answers.

    Attributes:
        url: its base URL.
        keys: that it asks for.
        tp_size: tensor parallel ranks.
        model: its model directory.
        log: what it printed.
    """

    url: str
    keys: EngineKeys
    tp_size: int
    model: Path
    log: Path


def require_environment() -> None:
    """Skip, or fail where REQUIRED is set, if no SGLang is installed."""
    if PYTHON.exists():
        return
    reason = f"there is no {PYTHON}: make it with `make sglang-env`"
    if os.environ.get(REQUIRED):
        pytest.fail(f"{reason} ({REQUIRED} is set)")
    pytest.skip(reason)


@contextmanager
def starting(
    model: Path,
    log: Path,
    *,
    tp_size: int = 1,
    keys: EngineKeys = NO_KEYS,
    overrides: Sequence[str] = (),
) -> Iterator[Callable[[], RealServer]]:
    """Start a server; what is yielded waits until it answers. Ended on exit.

    Args:
        model: its model directory.
        log: file for what it prints.
        tp_size: tensor parallel ranks.
        keys: that it asks for.
        overrides: of configs/sglang_cpu.yaml.
    """
    args = [sys.executable, str(SERVE), str(model), f"--log={log}"]
    args += [f"engine.tensor_parallel_size={tp_size}", *overrides]
    env = os.environ | {API_KEY_VARIABLE: keys.api, ADMIN_KEY_VARIABLE: keys.admin}
    process = start_child(args, env=env, stdout=subprocess.PIPE)

    def answering() -> RealServer:
        line = process.stdout.readline()  # serve.py has the deadline
        if not line:
            pytest.fail(f"no server, exit code {process.wait(30)}:\n{log.read_text()[-3000:]}")
        return RealServer(json.loads(line)["url"], keys, tp_size, model, log)

    try:
        yield answering
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
        process.stdin.close()
