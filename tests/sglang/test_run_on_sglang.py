"""A whole asynchronous run whose engine is a real SGLang, started by its generator."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_grpo.analysis.audit import audit
from async_grpo.config.run_directory import RunDirectory
from tests.sglang.real_server import PYTHON, REPOSITORY, require_environment

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

NUM_STEPS = 6
FLOAT32_NOISE = 1e-5
"""nats; the largest difference of a token's log-prob between trainer and engine"""
SMALL = [
    "task.options.length=3", "policy.maker_options.length=3",
    "task.options.alphabet=abcd", "policy.maker_options.alphabet=abcd",
    "policy.maker_options.gate=0.02", "policy.maker_options.max_steps=60",
    "policy.maker_options.num_held_out=8",
    "generation.group_size=4", "generation.max_new_tokens=5", "replay.groups_per_step=8",
    "metrics.tensorboard=false",
]  # fmt: skip


def run(directory: Path, *overrides: str) -> list[dict[str, Any]]:
    """`async-grpo run configs/sglang_cpu.yaml`; the lines of its metrics."""
    config = REPOSITORY / "configs" / "sglang_cpu.yaml"
    ours = [f"run.output_dir={directory}", f"run.num_train_steps={NUM_STEPS}"]
    args = [sys.executable, "-m", "async_grpo", "run", str(config), *ours, *SMALL, *overrides]
    done = subprocess.run(
        [*args, f"engine.python={PYTHON}"], capture_output=True, text=True, timeout=860
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = RunDirectory(directory).metrics.read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_short_run_learns_from_exact_log_probs_and_its_books_balance(tmp_path: Path) -> None:
    require_environment()
    steps = run(tmp_path / "run")
    report = audit(tmp_path / "run")
    figures = report.to_json()
    assert report.ok, figures["problems"]
    assert figures["trained"] == 8 * NUM_STEPS
    assert figures["max_staleness_trained"] <= 4
    assert [step["policy_version"] for step in steps] == list(range(1, NUM_STEPS + 1))
    # asynchronous: the trainer was ahead of the weights that sampled
    assert max(step["staleness/max"] for step in steps) > 0
    # nothing between sampling and training changes a log-prob
    gaps = [step["logprob/lag0_gap_max"] for step in steps if step.get("logprob/lag0_tokens")]
    assert gaps
    assert max(gaps) < FLOAT32_NOISE
    assert max(step["sync/probe_gap"] for step in steps) < FLOAT32_NOISE
    # 32 completions a step are a noisy mean, not a falling one
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[3:]) > sum(rewards[:3]) - 0.5
