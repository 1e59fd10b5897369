"""What a role that is started by hand finds checked and written."""

import logging
from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from async_grpo.config.run_directory import RunDirectory
from async_grpo.errors import ConfigError
from async_grpo.launch.alone import continue_or_begin, log_to_file, make_directory, require_model
from async_grpo.replay.core.records import Made, encode_record
from async_grpo.types import TicketKind


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{output_dir: {tmp_path}/run, num_train_steps: 4}}\n"
        f"policy: {{model: {tmp_path}/model}}\ntask: {{name: reverse}}\n"
    )
    return path


def test_a_run_is_continued_as_it_was_and_refused_otherwise(config_path: Path) -> None:
    config = load_config(config_path)
    directory = RunDirectory(Path(config.run.output_dir))
    continue_or_begin(config)
    assert load_config(directory.config) == config
    continue_or_begin(load_config(config_path, ["run.seed=1"]))  # nothing has been done yet
    directory.ledger.write_bytes(
        encode_record(Made(group_id=0, prompt_index=0, kind=TicketKind.TRAIN)) + b"\n"
    )
    continue_or_begin(load_config(config_path, ["run.seed=1", "replay.address=tcp://h:1"]))
    with pytest.raises(ConfigError, match=r"another configuration\nrun\.seed: .*1, now it is 0"):
        continue_or_begin(config)
    assert load_config(directory.config).run.seed == 1


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.output_dir: cannot write to .*file"):
        make_directory(RunDirectory(tmp_path / "file"))


def test_the_log_goes_to_the_run_directory(config_path: Path) -> None:
    config = load_config(config_path)
    root = logging.getLogger()
    before = list(root.handlers)
    try:
        log_to_file(config, "generator-7")
        logging.getLogger("async_grpo.x").warning("something happened")
    finally:
        for handler in set(root.handlers) - set(before):
            root.removeHandler(handler)
            handler.close()
    log = RunDirectory(Path(config.run.output_dir)).role_log("generator-7")
    assert "WARNING async_grpo.x: something happened" in log.read_text()


def test_a_model_directory_must_be_whole(config_path: Path, tmp_path: Path) -> None:
    config = load_config(config_path)
    with pytest.raises(ConfigError, match="there is no directory"):
        require_model(config, tokenizer=False)
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json, tokenizer\.json, \*\.safetensors"):
        require_model(config, tokenizer=True)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("")
    require_model(config, tokenizer=False)
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json;"):
        require_model(config, tokenizer=True)
    (model / "model-2.safetensors").symlink_to(tmp_path / "blob")  # as a cache that was cleared
    with pytest.raises(ConfigError, match=r"model-2\.safetensors cannot be read"):
        require_model(config, tokenizer=False)


def test_a_name_on_the_hub_is_left_to_those_who_download_it(config_path: Path) -> None:
    require_model(load_config(config_path, ["policy.model=owner/model"]), tokenizer=True)
    maker = ["policy.model=owner/model", "policy.maker=a:b"]
    with pytest.raises(ConfigError, match="async-grpo prepare CONFIG"):
        require_model(load_config(config_path, maker), tokenizer=True)
