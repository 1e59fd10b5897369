"""One torch, hence one NCCL, for trainer and engines on GPUs; the docs say the same."""

import re
from importlib.metadata import requires
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
_PIN = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+)$", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    return dict(_PIN.findall((REPOSITORY / name).read_text()))


GPU = pins("constraints-gpu.txt")


def test_both_environments_of_a_gpu_machine_are_held_to_one_torch():
    assert sorted(GPU) == ["sglang", "torch"]
    lines = (REPOSITORY / "Makefile").read_text().replace("\\\n", " ").splitlines()
    installs = [line for line in lines if "GPU_VENV)/bin/python -m pip install" in line]
    assert len(installs) == 2
    assert all("--constraint constraints-gpu.txt" in line for line in installs)
    assert "torch" in pins("constraints.txt"), "CPU and CI have their own"


def test_the_sglang_of_gpus_is_the_one_that_was_tried_on_a_cpu():
    assert pins("tools/sglang_cpu/requirements.txt")["sglang"] == GPU["sglang"]
    text = (REPOSITORY / "docs/sglang.md").read_text()
    assert f"**Tried**: sglang {GPU['sglang']} " in text


def test_the_page_names_the_pinned_versions():
    page = (REPOSITORY / "docs/gpu.md").read_text()
    assert f"| {GPU['torch']} (`constraints-gpu.txt`: what sglang {GPU['sglang']} pins)" in page
    assert f"| {pins('constraints.txt')['torch']} (`constraints.txt`" in page


def pinned_by(metadata: Path, package: str) -> dict[str, str]:
    """Exact requirements of an installed package, by its METADATA file."""
    text = metadata.read_text(encoding="utf-8")
    found = re.findall(r"^Requires-Dist: ([\w.-]+)(?:\[[^]]*\])?==([\w.]+)", text, re.MULTILINE)
    assert found, f"{package} pins nothing"
    return dict(found)


def metadata_of(environment: str, package: str) -> Path | None:
    root = REPOSITORY / environment
    return next(root.glob(f"lib/python3*/site-packages/{package}-*.dist-info/METADATA"), None)


def test_the_torch_of_gpus_is_the_one_that_this_sglang_asks_for():
    metadata = metadata_of(".venv-sglang", "sglang")
    if metadata is None or f"\nVersion: {GPU['sglang']}\n" not in metadata.read_text():
        pytest.skip("needs the environment of `make sglang-env`")
    assert pinned_by(metadata, "sglang")["torch"] == GPU["torch"]


def test_nccl_is_pinned_alike_where_both_environments_are_builds_for_cuda():
    ours = [line for line in requires("torch") or [] if line.startswith("nvidia-nccl")]
    theirs = metadata_of(".venv-sglang-gpu", "torch")
    if not ours or theirs is None:
        pytest.skip("needs both environments of `make gpu-envs`")
    (nccl,) = [line.partition(";")[0].strip() for line in ours]
    assert f"Requires-Dist: {nccl}" in theirs.read_text(), "NCCL works with its own version only"
