"""The measurement behind the probe's limits, on a tiny model."""

import argparse

import pytest
import torch

from tests.fakes.tiny_policy import tiny_module
from tools.probe_noise import measure


def test_correct_engines_pass_and_spoiled_and_stale_tensors_are_found(tmp_path, capsys):
    tiny_module(dtype=torch.float32).save_pretrained(tmp_path)
    args = argparse.Namespace(
        model=str(tmp_path), probes=8, tokens=41, batch=4, every=3, seed=0, native=True, json=None
    )
    found = measure(args)
    for engine in ("eager", "float32"):
        assert (found[engine]["refused"], found[engine]["refused_twice"]) == (0, 0)
        assert 0 < found[engine]["token_mean"] < 0.05
    for kind in ("zeroed", "random"):
        assert found["spoiled"][kind]["asked_twice"] > 0.8
    for line in found["stale"]:
        assert line["checksum"] == line["bytes_differ"]
    assert found["stale"][-1]["bytes_differ"] > found["stale"][-1]["tensors"] / 2
    assert found["tolerance"]["max"] == pytest.approx(0.05)
    assert "engine eager" in capsys.readouterr().out
