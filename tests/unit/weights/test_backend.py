"""Which collective library carries weights where the configuration leaves it open."""

import logging
from dataclasses import replace

import pytest
import torch

from async_grpo.config.engine import EngineSection
from async_grpo.config.weights import Backend, Transport, WeightsSection
from async_grpo.errors import ConfigError
from async_grpo.weights.backend import Surroundings, settings_in_force, why_not_nccl
from tests.fakes.replay_harness import replay_config

APART = Surroundings(
    trainer_card=0, num_cards=8, has_nccl=True, kind="sglang", attached=False, server_device="",
    device_ids=("1", "2,3"),
)  # fmt: skip
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"device_ids": ()},
        {"device_ids": (), "num_cards": 2},
        {"server_device": "cuda"},
        {"trainer_card": 4},
    ],
    ids=str,
)
def test_servers_that_are_started_on_cards_of_their_own_get_weights_over_nccl(changes):
    assert why_not_nccl(replace(APART, **changes)) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trainer_card": None}, "the trainer computes on the CPU"),
        ({"has_nccl": False}, "the trainer's torch has no NCCL"),
        ({"attached": True}, "nothing is known of the devices of engines that run already"),
        ({"kind": "embedded"}, "an engine of kind embedded may share the trainer's card"),
        ({"kind": "mine:Start"}, "an engine of kind mine:Start may share the trainer's card"),
        ({"server_device": "cpu"}, "engines compute on another device (--device=cpu)"),
        ({"device_ids": (), "num_cards": 1}, "trainer and engines have one card"),
        ({"trainer_card": 3}, "card 3 is the trainer's and an engine's"),
        ({"device_ids": ("1", "GPU-8f2c")}, "card GPU-8f2c of engine.device_ids may be"),
    ],
    ids=str,
)
def test_auto_is_gloo_for_a_reason(changes, reason):
    assert reason in why_not_nccl(replace(APART, **changes))


@pytest.fixture
def config(tmp_path):
    return replace(
        replay_config(tmp_path),
        engine=EngineSection(kind="sglang", python="python", device_ids=["1"]),
    )


def test_auto_is_resolved_and_said_in_the_log(config, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    assert settings_in_force(config, CPU).backend is Backend.gloo
    assert "weights travel over gloo: the trainer computes on the CPU" in caplog.text
    caplog.clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert settings_in_force(config, CARD) == replace(config.weights, backend=Backend.nccl)
    assert "weights travel over nccl: trainer and engines have cards of their own" in caplog.text
    caplog.clear()
    engine = replace(config.engine, server_args=["--attention-backend", "x", "--device", "cpu"])
    assert settings_in_force(replace(config, engine=engine), CARD).backend is Backend.gloo
    assert "(--device=cpu) (weights.backend=nccl is faster, if" in caplog.text


def test_nccl_that_cannot_be_had_is_refused_at_the_start(config, monkeypatch):
    asked = replace(config, weights=WeightsSection(backend=Backend.nccl))
    with pytest.raises(ConfigError, match=r"weights\.backend is nccl, but the trainer computes on"):
        settings_in_force(asked, CPU)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=r"torch has no NCCL; set weights\.backend"):
        settings_in_force(asked, CARD)


@pytest.mark.parametrize(
    "section",
    [WeightsSection(backend=Backend.gloo), WeightsSection(transport=Transport.http)],
    ids=["gloo", "files"],
)
def test_what_leaves_nothing_open_stays(config, section, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", pytest.fail)
    assert settings_in_force(replace(config, weights=section), CARD) is section
