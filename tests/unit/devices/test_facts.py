"""What other interpreters are asked, what they may answer, and those that do not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from async_grpo.devices import facts as module
from async_grpo.devices.facts import Asked, Facts
from async_grpo.devices.probe import driver_version
from async_grpo.errors import ConfigError
from tests.fakes.machine import answer, answering, make_interpreter, make_machine

PROBE = Path(module.__file__).with_name("probe.py").read_text()
FAKE_TORCH = """
import types
__version__ = "2.14.1+cu130"
version = types.SimpleNamespace(cuda="13.0", hip=None)
_C = types.SimpleNamespace(_nccl_version=0)
def info(number):
    if number:
        raise RuntimeError("CUDA error: device is busy\\nand more")
    return (5, 9)
cuda = types.SimpleNamespace(
    nccl=types.SimpleNamespace(version=lambda: (2, 30, 7)),
    init=lambda: None, device_count=lambda: 2, mem_get_info=info,
    get_device_properties=lambda number: types.SimpleNamespace(
        name="H100", uuid=f"u{number}", total_memory=9),
)
"""


def ask(python: str, **options: float) -> Facts:
    return Asked(python, os.environ, "engine.python", **options).answer()


def test_an_answer_is_the_last_line(tmp_path):
    found = ask(answering(tmp_path / "python", answer(2)))
    assert (found.torch, found.nccl, found.problem) == ("2.14.1+cu130", "2.30.7", "")
    assert str(found) == (
        "torch 2.14.1+cu130, CUDA 13.0, NCCL 2.30.7, driver 580.65.06, 2 x NVIDIA H100 (80.0 GiB)"
    )


def test_a_real_interpreter_tells_its_torch():
    found = ask(sys.executable)
    assert found.torch == torch.__version__
    assert found.cards or found.problem


def test_what_cuda_shows_is_told_card_by_card(tmp_path):
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={"PYTHONPATH": str(tmp_path)}, capture_output=True,
        check=True, timeout=50,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["torch"], found["cuda"], found["nccl"]) == ("2.14.1+cu130", "13.0", "2.30.7")
    first, second = found["cards"]
    assert first == {"name": "H100", "uuid": "u0", "total_bytes": 9, "free_bytes": 5}
    assert second["problem"] == "CUDA error: device is busy"


def test_an_environment_without_torch_is_told_apart(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={"PYTHONPATH": str(tmp_path)}, capture_output=True,
        check=True, timeout=50,
    )  # fmt: skip
    problem = json.loads(done.stdout)["problem"]
    assert problem == "torch cannot be imported: libcudart.so.13 is missing"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise SystemExit('no module named json')", "no module named json"),
        ("print('no JSON')", "no JSON"),
        ("raise SystemExit(3)", "no answer, exit code 3"),
    ],
)
def test_an_interpreter_that_fails_says_why(tmp_path, text, says):
    python = make_interpreter(tmp_path / "python", text)
    with pytest.raises(ConfigError, match=f"engine.python: .* cannot tell its torch.*: {says}"):
        ask(python)


def test_one_that_never_answers_is_ended_at_the_deadline(tmp_path):
    """A pipe that nobody writes to: it would wait for ever."""
    os.mkfifo(tmp_path / "never")
    python = make_interpreter(tmp_path / "python", f"open({str(tmp_path / 'never')!r}).read()")
    with pytest.raises(ConfigError, match=r"did not tell its torch and its cards within 0\.2 s"):
        ask(python, answer_s=0.2)


def test_one_that_cannot_be_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.python: cannot run .*: No such file"):
        ask(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Rel", "580.65.06"),
        ("something else", ""),
    ],
)
def test_the_drivers_version_is_read_from_the_kernel(tmp_path, text, version):
    root = make_machine(tmp_path, 1)
    (root / "proc/driver/nvidia/version").write_text(f"{text}\nGCC version: 12.2.0\n")
    assert driver_version(str(root)) == version


def test_a_driver_that_is_new_enough_is_not_blamed():
    found = Facts(torch="2.14.1", cuda="13.0", driver="580.65.06", problem="no device")
    assert found.unusable() == "torch 2.14.1 cannot use CUDA: no device"
