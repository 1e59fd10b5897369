"""`run --resume`: which run directories it continues, and what it says of the others."""

from pathlib import Path

import pytest

from async_grpo.config.load import load_config, to_yaml
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.errors import ConfigError
from async_grpo.launch.alone import make_directory
from async_grpo.launch.run import hold_directory, run_commands, take_directory
from async_grpo.launch.supervisor import START_S
from async_grpo.replay.core.records import DatasetAgreed, Made, encode_record
from async_grpo.replay.store import Ledger
from async_grpo.types import TicketKind


def used(path: Path) -> tuple[Config, RunDirectory]:
    """The configuration, and its run directory after a first start."""
    config = load_config(path)
    directory = RunDirectory(Path(config.run.output_dir))
    make_directory(directory)
    take_directory(directory, config, resume=False)
    directory.ledger.write_bytes(
        encode_record(Made(group_id=0, prompt_index=0, kind=TicketKind.TRAIN)) + b"\n"
    )
    return config, directory


def test_a_used_directory_needs_resume(config_path: Path) -> None:
    config, directory = used(config_path)
    with pytest.raises(ConfigError, match="--resume"):
        take_directory(directory, config, resume=False)
    take_directory(directory, config, resume=True)


def test_a_start_that_came_to_nothing_is_forgotten(config_path: Path) -> None:
    _, directory = used(config_path)
    record = DatasetAgreed(fingerprint="of other data", num_prompts=3)
    directory.ledger.write_bytes(encode_record(record) + b"\n")
    directory.ledger_snapshot.touch()
    other = load_config(config_path, ["run.seed=1"])
    take_directory(directory, other, resume=False)
    assert not directory.ledger.exists()
    assert not directory.ledger_snapshot.exists()
    assert load_config(directory.config).run.seed == 1


def test_a_ledger_that_cannot_be_read_is_kept(config_path: Path) -> None:
    config, directory = used(config_path)
    directory.ledger.write_text("not a record\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        take_directory(directory, config, resume=False)
    assert directory.ledger.read_text() == "not a record\n"


def test_resume_without_a_run_starts_one(config_path: Path) -> None:
    config = load_config(config_path)
    directory = RunDirectory(Path(config.run.output_dir))
    make_directory(directory)
    take_directory(directory, config, resume=True)
    assert directory.config.read_text() == to_yaml(config)


def test_a_changed_configuration_is_refused_with_all_differences(config_path: Path) -> None:
    _, directory = used(config_path)
    before = directory.config.read_text()
    changed = load_config(config_path, ["trainer.lr=0.5", "run.seed=1"])
    with pytest.raises(ConfigError) as caught:
        take_directory(directory, changed, resume=True)
    assert caught.value.problems == [
        "--resume: run.seed: the run has 0, now it is 1",
        "--resume: trainer.lr: the run has 1e-06, now it is 0.5",
    ]
    assert directory.config.read_text() == before


def test_more_steps_are_written_down(config_path: Path) -> None:
    _, directory = used(config_path)
    more = load_config(config_path, ["run.num_train_steps=9"])
    take_directory(directory, more, resume=True)
    assert load_config(directory.config).run.num_train_steps == 9


def test_a_run_with_nothing_left_to_do_is_refused(config_path: Path) -> None:
    config, directory = used(config_path)
    directory.final_model.mkdir()
    (directory.checkpoints / "2.4").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"all 4 train steps .* are done; raise it"):
        take_directory(directory, config, resume=True)
    more = load_config(config_path, ["run.num_train_steps=5"])
    take_directory(directory, more, resume=True)


def test_a_directory_without_its_configuration_is_refused(config_path: Path) -> None:
    config, directory = used(config_path)
    directory.config.unlink()
    with pytest.raises(ConfigError, match=r"config\.yaml is missing"):
        take_directory(directory, config, resume=True)


def test_a_run_that_still_goes_on_is_left_alone(config_path: Path) -> None:
    _, directory = used(config_path)
    before = directory.config.read_text()
    more = load_config(config_path, ["run.num_train_steps=9"])
    ledger = Ledger(directory.ledger)
    with pytest.raises(ConfigError, match="still going on"):
        take_directory(directory, more, resume=True)
    assert directory.config.read_text() == before
    ledger.close()
    take_directory(directory, more, resume=True)


def test_a_second_run_does_not_begin_beside_the_first(config_path: Path) -> None:
    directory = RunDirectory(Path(load_config(config_path).run.output_dir))
    with (
        hold_directory(directory),
        pytest.raises(ConfigError, match="still going on; stop it"),
        hold_directory(directory),
    ):
        pytest.fail("both hold it")
    with hold_directory(directory):
        pass  # the end of the first frees it


def test_checkpoints_are_ordered_by_numbers(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for name in ("2.9", "10.3", "2.10", ".partial-3.1", "void-2.11", "2.x", "latest"):
        (directory.checkpoints / name).mkdir(parents=True)
    assert directory.checkpoints_by_age() == [(2, 9), (2, 10), (10, 3)]


def test_the_replay_server_of_a_long_run_gets_time_to_read_its_ledger(config_path: Path) -> None:
    config, directory = used(config_path)
    assert run_commands(config, directory).replay_start_s == pytest.approx(START_S, abs=0.01)
    with directory.ledger.open("r+b") as file:
        file.truncate(1_500_000_000)  # takes no room on the disk
    assert run_commands(config, directory).replay_start_s == pytest.approx(START_S + 300.0)
