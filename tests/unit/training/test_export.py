from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.config.run_directory import RunDirectory
from async_grpo.errors import ConfigError
from async_grpo.launch import cli
from async_grpo.training.export import export
from async_grpo.training.toy import make_toy_tokenizer
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

    with pytest.raises(ConfigError, match="no final_model yet"):
        export(run_dir.root, tmp_path / "out")
    with pytest.raises(ConfigError, match="is no run directory"):
        export(tmp_path, tmp_path / "out")


def test_a_broken_model_is_not_passed_on(run_dir: RunDirectory, tmp_path: Path) -> None:
    (run_dir.final_model / "config.json").write_text("{}")

    with pytest.raises(ConfigError, match="cannot load"):
        export(run_dir.root, tmp_path / "out")

    assert not (tmp_path / "out").exists()
