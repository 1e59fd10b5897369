"""The script for a first day on a card, in the size of a CPU: every part that a CPU can do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_day.py"


def test_every_part_that_a_cpu_can_do_is_done(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--cpu", f"--out={tmp_path}", "--peak-flops=1e12"],
        capture_output=True, text=True, cwd=tmp_path, timeout=390, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    parts = {part["name"]: part for part in found["parts"]}
    assert {name: part["status"] for name, part in parts.items()} == {
        **dict.fromkeys(parts, "ok"), "side_stream": "not run",
    }  # fmt: skip
    assert list(parts) == [
        "self_test", "step", "step_checkpointed", "probe_noise", "side_stream", "quickstart",
        "engine: embedded",        "transport_gloo", "transport_http", "transport_disk", "doctor",
    ]  # fmt: skip
    kept, again = parts["step"]["figures"], parts["step_checkpointed"]["figures"]
    assert kept["loss"] == pytest.approx(again["loss"], rel=1e-6)
    assert 0 < kept["mfu"] < 1
    for name in ("gloo", "http", "disk"):
        figures = parts[f"transport_{name}"]["figures"]
        assert (figures["steps"], figures["stopped"]) == (3, "no")
        assert figures["pause_s"] > 0
    assert parts["doctor"]["figures"]["weights"] == "ok"
    table = (tmp_path / "figures.md").read_text()
    assert all(f"| {name} | {part['status']} |" in table for name, part in parts.items())
