"""`auto` never becomes the CPU in silence on a machine with a card."""

import logging
from pathlib import Path

import pytest
import torch

from async_grpo.devices.choice import HIDE_CARDS_OF_ENGINES, auto_device, resolve_device
from async_grpo.errors import ConfigError
from tests.fakes.machine import make_machine

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="of a torch that was built without CUDA"
)
CPU = torch.device("cpu")
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update"


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch as it is built for CUDA 13, with a driver of CUDA 12."""

    def refuse() -> None:
        raise RuntimeError(f"{TOO_OLD}\nand more")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    monkeypatch.setattr(torch.cuda, "init", refuse)


def test_auto_is_the_cpu_where_there_is_no_card(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert resolve_device("auto", environ={}, root=tmp_path) == CPU
    assert caplog.messages == [
        f"computing on cpu; torch {torch.__version__}, CUDA none, NCCL none, driver none, no card"
    ]


@pytest.mark.usefixtures("cuda_build")
def test_a_driver_too_old_does_not_make_auto_the_cpu(tmp_path):
    with pytest.raises(ConfigError) as caught:
        resolve_device("auto", environ={}, root=make_machine(tmp_path, 2, driver="550.54.15"))
    assert str(caught.value) == (
        "trainer.device: this machine has an NVIDIA card, but torch 2.14.1+cu130 cannot use CUDA: "
        f"{TOO_OLD}; the driver is 550.54.15, and torch for CUDA 13.0 needs branch 580 or newer "
        "(docs/gpu.md); to go on without the card set trainer.device=cpu, or start with "
        "CUDA_VISIBLE_DEVICES= (empty)"
    )


@pytest.mark.usefixtures("cuda_build")
def test_a_named_card_says_why_it_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.device is 'cuda:1', but .*needs branch 580"):
        resolve_device("cuda:1", root=make_machine(tmp_path, 2, driver="550.54.15"))


def test_a_torch_without_cuda_does_not_make_auto_the_cpu_beside_a_card(tmp_path):
    root = make_machine(tmp_path, 1)
    with pytest.raises(ConfigError, match="cannot use CUDA: it is a build without CUDA"):
        resolve_device("auto", environ={}, root=root)
    with pytest.raises(ConfigError, match=r"set engine\.environment\.CUDA_VISIBLE_DEVICES=''"):
        auto_device("the embedded engine", HIDE_CARDS_OF_ENGINES, environ={}, root=root)


def test_who_asks_for_the_cpu_or_hides_the_cards_gets_the_cpu(tmp_path):
    root = make_machine(tmp_path, 1)
    assert resolve_device("cpu", environ={}, root=root) == CPU
    assert resolve_device("auto", environ={"CUDA_VISIBLE_DEVICES": ""}, root=root) == CPU


def test_cards_of_the_host_that_a_container_may_not_open_are_none_of_ours(tmp_path: Path):
    root = make_machine(tmp_path, 1)
    (root / "dev" / "nvidia0").unlink()
    assert resolve_device("auto", environ={}, root=root) == CPU


def test_a_device_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"trainer\.device"):
        resolve_device("warp9")


def test_the_first_card_is_chosen_and_told(tmp_path, monkeypatch, caplog):
    class Properties:
        name, uuid, total_memory = "NVIDIA H100", "ab", 80 << 30

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    caplog.set_level(logging.INFO)
    root = make_machine(tmp_path, 2)
    assert resolve_device("auto", environ={}, root=root) == torch.device("cuda", 0)
    assert caplog.messages[0].startswith("computing on cuda:0; torch ")
    assert caplog.messages[0].endswith("driver 580.65.06, 1 x NVIDIA H100 (80.0 GiB)")
    with pytest.raises(ConfigError, match="'cuda:2', but CUDA shows this process 2 cards"):
        resolve_device("cuda:2", root=root)
