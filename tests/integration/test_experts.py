"""Experts and buffers reach a real engine, though transformers computes with fused experts.

What travels has the names of a checkpoint; see `weights.tensor_list`.
"""

from pathlib import Path

import pytest
import yaml

from async_grpo.config.load import load_config
from async_grpo.doctor.report import Verdict
from async_grpo.doctor.runner import run_doctor
from tests.fakes.tiny_moe import save_tiny_moe

pytestmark = pytest.mark.timeout(180)  # loads a model twice on a busy machine


@pytest.mark.parametrize(
    ("kind", "dtype", "transport", "num_tensors"),
    [
        ("qwen3_moe", "float32", "broadcast", 45),
        ("glm4_moe", "bfloat16", "broadcast", 35),  # its buffer stays float32
        ("glm4_moe", "float32", "http", 35),
        ("mixtral", "float32", "disk", 41),
    ],
)
def test_every_tensor_reaches_the_embedded_engine(
    kind: str, dtype: str, transport: str, num_tensors: int, tmp_path: Path
) -> None:
    content = {
        "run": {"output_dir": str(tmp_path / "run"), "num_train_steps": 1},
        "policy": {"model": str(save_tiny_moe(kind, tmp_path / "model")), "dtype": dtype},
        "task": {"name": "reverse"},
        "generation": {"max_new_tokens": 16},
        "engine": {"max_running_requests": 8},
        "weights": {"transport": transport},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    report = run_doctor(load_config(path), [str(path)])
    found = {finding.check: finding for finding in report.findings}
    for check in ("log-probs, T=1", "weights"):
        assert found[check].verdict is Verdict.OK, found[check]
    assert found["weights"].figure.startswith(
        f"{num_tensors} tensors perturbed, sent and sent back"
    )
