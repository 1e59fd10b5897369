import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

TOOL = Path(__file__).parents[3] / "tools" / "plot_run.py"
PNG = b"\x89PNG\r\n\x1a\n"


def plot(*args: object) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, str(TOOL), *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=50)


def step(number: int, **more: float) -> str:
    values = {
        "step": number, "policy_version": number + 1, "reward/mean": number / 10,
        "staleness/mean": 1.0, "staleness/max": 2.0, "time/wall_s": 60.0, **more,
    }  # fmt: skip
    return json.dumps(values) + "\n"


def test_a_run_with_evaluations_and_a_torn_line_is_drawn(tmp_path: Path) -> None:
    evaluation = {"eval/policy_version": 0.0, "eval/reward_mean": 0.1}
    last = {"step": 4, "eval/policy_version": 4.0, "eval/reward_mean": 0.5}
    lines = [step(0), step(1, **evaluation), step(2), step(3), json.dumps(last) + "\n"]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 5, "rew')

    done = plot(tmp_path, tmp_path / "out.png")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")

    done = plot(tmp_path, tmp_path / "out.png")

    assert done.returncode == 2
    assert "has no train step yet" in done.stderr
    assert not (tmp_path / "out.png").exists()
