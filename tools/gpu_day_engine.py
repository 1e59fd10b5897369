"""The engine beside the trainer of `gpu_day.py`, and short runs with it."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.transport.parent import start_child

if TYPE_CHECKING:
    from gpu_day_parts import Settings

REPOSITORY = Path(__file__).resolve().parents[1]
START_S = 180.0
"""Budget of the engine's start."""
STOP_S = 20.0
"""Budget of a run from SIGTERM to its end."""
GPU_SERVER_ARGS = ["--mem-fraction-static=0.3", "--enable-metrics"]
"""The trainer needs the rest of the card."""
SMALL_QUICKSTART = [
    "run.num_train_steps=6",
    "replay.groups_per_step=8",
    "policy.maker_options={length: 3, alphabet: abcd, gate: 0.02, max_steps: 60, num_held_out: 8}",
    "task.options={length: 3, alphabet: abcd}",
]
"""A model that is barely warmed up."""
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"


def overrides_of(settings: "Settings") -> list[str]:
    """What the runs and the engine of this day have in common, as `key=value`."""
    given = [
        f"policy.model={settings.run_model}",
        "policy.maker=''",
        f"policy.dtype={'float32' if settings.cpu else 'bfloat16'}",
        f"trainer.device={'cpu' if settings.cpu else 'cuda'}",
        "engine.max_running_requests=32",
        "engine.context_length=32",
    ]
    if settings.engine_python:
        given += ["engine.kind=sglang", f"engine.python={settings.engine_python}"]
    return given


def command(settings: "Settings") -> list[str]:
    """The engine that prints `{"url": ...}` once it answers."""
    given = [*overrides_of(settings), f"run.output_dir={settings.directory}/engine"]
    if not settings.engine_python:
        args = ["-m", "async_grpo", "engine", str(QUICKSTART), *given, "engine.port=0"]
        return [sys.executable, *args]
    if not settings.cpu:
        given.append(f"engine.server_args={json.dumps(GPU_SERVER_ARGS)}")
    serve = REPOSITORY / "tools" / "sglang_cpu" / "serve.py"
    log = f"--log={settings.directory}/sglang.log"
    return [sys.executable, str(serve), settings.run_model, log, *given]


def first_url(process: "subprocess.Popen[bytes]", limit_s: float) -> str:
    """What it prints; empty: it ended, or was silent for so long."""
    lines: queue.Queue[bytes] = queue.Queue()
    output = process.stdout
    assert output is not None
    threading.Thread(target=lambda: lines.put(output.readline()), daemon=True).start()
    try:
        line = lines.get(timeout=limit_s)
    except queue.Empty:
        return ""
    return str(json.loads(line)["url"]) if line else ""


def quickstart(settings: "Settings") -> dict[str, Any]:
    """`make quickstart` as it is; the CPU makes a smaller task of it, and fewer steps."""
    directory = Path(settings.directory) / "quickstart"
    return short_run(settings, directory, SMALL_QUICKSTART if settings.cpu else [])


def transport(settings: "Settings", name: str) -> dict[str, Any]:
    """A short run with the engine, whose weights travel by `name`."""
    sync = {
        "gloo": ["weights.transport=broadcast", "weights.backend=gloo"],
        "http": ["weights.transport=http"],
        "disk": ["weights.transport=disk"],
    }[name]
    steps = 3 if settings.cpu else 8
    given = [
        *overrides_of(settings), *sync, f'engine.urls=["{settings.engine_url}"]',
        f"run.num_train_steps={steps}", "replay.groups_per_step=8",
    ]  # fmt: skip
    return short_run(settings, Path(settings.directory) / f"transport_{name}", given)


def short_run(settings: "Settings", directory: Path, given: Sequence[str]) -> dict[str, Any]:
    """A whole `async-grpo run`, ended by SIGTERM at its deadline.

    Raises:
        RuntimeError: it failed, or trained nothing.
    """
    args = [sys.executable, "-m", "async_grpo", "run", str(QUICKSTART)]
    args += [f"run.output_dir={directory}", *given]
    stopped = "no"
    process = start_child(args)
    try:
        code = process.wait(max(5.0, settings.limit_s - STOP_S - 5.0))
    except subprocess.TimeoutExpired:
        stopped = "at its deadline"
        process.send_signal(signal.SIGTERM)
        code = process.wait(STOP_S)
    if code:
        raise RuntimeError(f"async-grpo run ended with exit code {code}; see {directory}/logs")
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    return {"stopped": stopped, **run_figures(lines)}


def run_figures(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of metrics.jsonl.

    Raises:
        RuntimeError: no step was trained.
    """
    steps = [line for line in lines if "reward/mean" in line]
    if not steps:
        raise RuntimeError("no step was trained")
    figures: dict[str, Any] = {"steps": len(steps)}
    seconds = [step["time/step_s"] for step in steps[1:] if "time/step_s" in step]
    if seconds:
        figures["steps_per_s"] = len(seconds) / sum(seconds)
    figures["reward_first"] = steps[0]["reward/mean"]
    figures["reward_last"] = steps[-1]["reward/mean"]
    for name, key in (
        ("publish_s", "sync/publish_s"),
        ("pause_s", "sync/pause_s"),
        ("probe_gap", "sync/probe_gap"),
        ("lag0_gap", "logprob/lag0_gap"),
    ):
        found = [step[key] for step in steps if step.get(key) is not None]
        if found:
            figures[name] = sorted(found)[len(found) // 2]
    return figures


def doctor(settings: "Settings") -> dict[str, Any]:
    """`async-grpo doctor` of the engine: each check's verdict."""
    given = [*overrides_of(settings), f'engine.urls=["{settings.engine_url}"]']
    args = [sys.executable, "-m", "async_grpo", "doctor", str(QUICKSTART), "--json", *given]
    args.append(f"run.output_dir={settings.directory}/doctor")
    done = subprocess.run(
        args, stdout=subprocess.PIPE, env=os.environ, timeout=settings.limit_s, check=False
    )
    report = json.loads(done.stdout)
    figures = {check["check"]: check["verdict"] for check in report["checks"]}
    failed = [f"{check['check']}: {check['figure']}" for check in report["checks"]
              if check["verdict"] == "fail"]  # fmt: skip
    if failed:
        figures |= {"status": "failed", "error": "; ".join(failed)}
    return figures
