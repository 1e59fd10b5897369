"""The doctor finds nothing wrong with a real SGLang, and sees what only a real one has."""

from pathlib import Path

import pytest
import yaml

from async_grpo.config.engine_keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from async_grpo.config.load import load_config
from async_grpo.doctor.report import Verdict
from async_grpo.doctor.runner import run_doctor
from async_grpo.errors import ExitCode
from tests.sglang.real_server import RealServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(700)]


def test_a_real_server_passes_every_check(
    real_servers: dict[str, RealServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = real_servers["sglang"]
    monkeypatch.setenv(API_KEY_VARIABLE, server.keys.api)
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, server.keys.admin)
    path = tmp_path / "config.yaml"
    content = {
        "run": {"output_dir": str(tmp_path / "run"), "num_train_steps": 1},
        "policy": {"model": str(server.model)},
        "task": {"name": "reverse"},
        "generation": {"max_new_tokens": 16},
        "engine": {"urls": [server.url], "control_timeout_s": 60},
    }
    path.write_text(yaml.safe_dump(content))
    report = run_doctor(load_config(path), [])
    failed = [finding for finding in report.findings if finding.verdict is Verdict.FAIL]
    assert failed == []
    assert report.exit_code is ExitCode.OK
    found = {finding.check: finding for finding in report.findings}
    assert found["text"].verdict is Verdict.OK  # it detokenizes, with the policy's tokenizer
    assert "under top_k=2 are of the full distribution" in found["distribution"].figure
    assert found["log-probs, T=0.7"].values["max"] < 2e-5
    assert found["prefix cache"].values["cached_tokens"] > 100
    assert found["prefix cache"].values["retract_bare_max"] < 2e-5
    assert found["spans"].values["retract_num_crossed"] > 0
    assert found["spans"].values["retract_gap_max"] < 2e-5
    assert found["prefix cache"].values["in_place_namespace_max"] < 2e-5
    assert found["spans"].values["in_place_gap_max"] < 2e-5
