from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.config.run_directory import RunDirectory
from async_grpo.errors import ConfigError
from async_grpo.launch import cli
from async_grpo.training.checkpoint import MODEL
from async_grpo.training.checkpoint_files import CheckpointFiles
from async_grpo.training.export import export
from async_grpo.training.toy import make_toy_tokenizer
from async_grpo.types import WeightsName
from tests.fakes.tiny_policy import tiny_module

CONFIG = """
run: {output_dir: ROOT, num_train_steps: 3}
policy: {model: gone/after/the/run}
task: {name: reverse}
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}>"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    """A finished run, whose initial model is not there any more."""
    directory = RunDirectory(tmp_path / "run")
    tokenizer = make_toy_tokenizer()
    tokenizer.chat_template = TEMPLATE
    module = tiny_module(dtype=torch.float32, vocab_size=len(tokenizer))
    module.config.use_cache = False  # as the trainer leaves it
    module.generation_config.max_new_tokens = 7
    module.save_pretrained(directory.final_model)
    tokenizer.save_pretrained(directory.final_model)
    directory.config.write_text(CONFIG.replace("ROOT", str(directory.root)))
    return directory


def test_transformers_loads_what_was_trained(run_dir: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"

    assert cli.main(["export", str(run_dir.root), str(out)]) == 0

    trained = AutoModelForCausalLM.from_pretrained(run_dir.final_model)
    exported = AutoModelForCausalLM.from_pretrained(out)
    for (name, value), (other, copy) in zip(
        trained.state_dict().items(), exported.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(value, copy)
    assert exported.config.use_cache
    assert exported.generation_config.max_new_tokens == 7
    tokenizer = AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "abc"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "abc>"
    ids = tokenizer("abc>", return_tensors="pt").input_ids
    assert exported.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_an_existing_directory_is_not_touched(run_dir: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")

    with pytest.raises(ConfigError, match="name a new directory"):
        export(run_dir.root, tmp_path / "out")

    assert (tmp_path / "out" / "mine").read_text() == "keep"


def test_a_run_without_a_trained_model_says_so(run_dir: RunDirectory, tmp_path: Path) -> None:
    run_dir.final_model.rename(tmp_path / "elsewhere")

    with pytest.raises(ConfigError, match="no checkpoint and no final_model yet"):
        export(run_dir.root, tmp_path / "out")
    with pytest.raises(ConfigError, match="is no run directory"):
        export(tmp_path, tmp_path / "out")


def checkpoint(run_dir: RunDirectory, version: int) -> Path:
    """A checkpoint whose every weight is `version`; the tied head is in it once, as written."""
    state = tiny_module(dtype=torch.float32, vocab_size=len(make_toy_tokenizer())).state_dict()
    del state["lm_head.weight"]

    tensors = {name: torch.full_like(value, version) for name, value in state.items()}
    files = CheckpointFiles(run_dir, keep=5)
    files.write(WeightsName(1, version), {MODEL: [save(tensors)]})
    return files.path(WeightsName(1, version))


def exported_value(run_dir: RunDirectory, out: Path) -> float:
    export(run_dir.root, out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    return model.model.norm.weight[0].item()


def test_the_newest_checkpoint_is_taken(run_dir: RunDirectory, tmp_path: Path) -> None:
    checkpoint(run_dir, 2)
    checkpoint(run_dir, 3)

    assert exported_value(run_dir, tmp_path / "out") == 3.0


def test_the_final_model_stands_in_for_a_damaged_newest_one(
    run_dir: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(run_dir, 2)
    (checkpoint(run_dir, 3) / MODEL).write_bytes(b"torn")
    final = AutoModelForCausalLM.from_pretrained(run_dir.final_model)

    found = exported_value(run_dir, tmp_path / "out")

    assert found == final.model.norm.weight[0].item()
    assert "checkpoint 1.3 is passed over" in caplog.text


def test_an_unfinished_run_is_exported_with_the_initial_models_tokenizer(
    run_dir: RunDirectory, tmp_path: Path
) -> None:
    initial = tmp_path / "initial"
    run_dir.final_model.rename(initial)
    run_dir.config.write_text(
        run_dir.config.read_text().replace("gone/after/the/run", str(initial))
    )
    checkpoint(run_dir, 1)
    (checkpoint(run_dir, 2) / MODEL).unlink()

    assert exported_value(run_dir, tmp_path / "out") == 1.0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE


def test_weights_of_another_model_are_refused(run_dir: RunDirectory, tmp_path: Path) -> None:
    CheckpointFiles(run_dir, keep=5).write(
        WeightsName(1, 1), {MODEL: [save({"other": torch.zeros(1)})]}
    )

    with pytest.raises(ConfigError, match=r"does not fit policy\.model: other tensors"):
        export(run_dir.root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_model_is_not_passed_on(run_dir: RunDirectory, tmp_path: Path) -> None:
    (run_dir.final_model / "config.json").write_text("{}")

    with pytest.raises(ConfigError, match="cannot load"):
        export(run_dir.root, tmp_path / "out")

    assert not (tmp_path / "out").exists()
