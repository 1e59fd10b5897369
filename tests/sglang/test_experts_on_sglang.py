"""Mixtures of experts on a real SGLang, which fuses their experts in a way of its own."""

from pathlib import Path

import pytest
import yaml

from async_grpo.config.load import load_config
from async_grpo.doctor.report import Verdict
from async_grpo.doctor.runner import run_doctor
from async_grpo.errors import ExitCode
from tests.fakes.tiny_moe import save_tiny_moe
from tests.sglang.real_server import require_environment, starting

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(700)]


@pytest.mark.parametrize(
    ("kind", "transport"),
    [("qwen3_moe", "broadcast"), ("glm4_moe", "broadcast"), ("mixtral", "disk")],
)
def test_a_mixture_of_experts_passes_every_check(kind: str, transport: str, tmp_path: Path) -> None:
    require_environment()
    model = save_tiny_moe(kind, tmp_path / "model")
    with starting(model, tmp_path / "server.log") as answering:
        content = {
            "run": {"output_dir": str(tmp_path / "run"), "num_train_steps": 1},
            "policy": {"model": str(model)},
            "task": {"name": "reverse"},
            "generation": {"max_new_tokens": 16},
            "engine": {"urls": [answering().url], "control_timeout_s": 60},
            "weights": {"transport": transport},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
        report = run_doctor(load_config(tmp_path / "config.yaml"), [])
    failed = [finding for finding in report.findings if finding.verdict is Verdict.FAIL]
    assert failed == []
    assert report.exit_code is ExitCode.OK
    found = {finding.check: finding for finding in report.findings}
    assert found["log-probs, T=1"].values["max"] < 2e-5
    assert found["spans"].values["in_place_gap_max"] < 2e-5
