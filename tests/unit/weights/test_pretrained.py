"""Directories that hold no whole model: refused, whatever transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from async_grpo.errors import ConfigError
from async_grpo.weights.pretrained import load_pretrained
from tests.fakes.tiny_policy import tiny_module

THREE_LAYERS = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_module(dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def change(model: Path, **values: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_whole_model_is_loaded(model: Path) -> None:
    module = load_pretrained(str(model), torch.bfloat16)
    assert module.dtype is torch.bfloat16
    assert torch.equal(module.lm_head.weight, tiny_module(dtype=torch.bfloat16).lm_head.weight)


@pytest.mark.parametrize(
    "values",
    [{"num_hidden_layers": 1}, {"hidden_size": "big"}, {"vocab_size": 99}, {"model_type": "none"}],
    ids=lambda values: next(iter(values)),
)
def test_a_configuration_that_fits_nothing_is_refused(model: Path, values: dict[str, Any]) -> None:
    change(model, **values)
    with pytest.raises(ConfigError, match=r"policy\.model: cannot load '.*': ."):
        load_pretrained(str(model), torch.float32)


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_a_file_that_was_cut_off_is_refused(model: Path, num_bytes: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ConfigError, match=r"policy\.model: cannot load"):
        load_pretrained(str(model), torch.float32)


def test_weights_that_are_missing_are_never_random(model: Path) -> None:
    change(model, **THREE_LAYERS)
    with pytest.raises(ConfigError, match=r"lack 11 tensors .* model\.layers\.2\.[a-z_.]* among"):
        load_pretrained(str(model), torch.float32)


def test_weights_that_nothing_uses_are_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(model, **ONE_LAYER)
    load_pretrained(str(model), torch.float32)
    assert "11 tensors in" in caplog.text
    assert "are not used, model.layers.1." in caplog.text
