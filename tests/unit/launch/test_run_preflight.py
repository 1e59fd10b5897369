"""What does not fit is refused before any role starts, and both sides are told of."""

from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from async_grpo.config.run_directory import RunDirectory
from async_grpo.doctor.report import Verdict
from async_grpo.doctor.runner import check_preflight
from async_grpo.errors import ExitCode
from async_grpo.launch import cli
from async_grpo.launch.run import run_commands
from tests.fakes.machine import answer, answering

MAKER = "policy.maker=some.module:maker"  # so that no model need be there


@pytest.fixture
def mixed(tmp_path: Path) -> list[str]:
    """Overrides: an engine whose NCCL no trainer has."""
    python = answering(tmp_path / "python", answer(1, nccl="1.0.0"))
    return [
        "engine.kind=sglang", f"engine.python={python}", "engine.device_ids=['0']",
        "trainer.device=cpu", "weights.backend=nccl",
    ]  # fmt: skip


def test_a_run_with_two_versions_of_nccl_ends_before_its_roles_start(
    config_path: Path, mixed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(config_path), MAKER, *mixed]) == ExitCode.CONFIG
    printed = capsys.readouterr()
    assert "weights.backend=nccl: NCCL works with its own version only" in printed.err
    assert "the engines have 1.0.0 (torch 2.14.1+cu130" in printed.err
    directory = RunDirectory(Path(load_config(config_path).run.output_dir))
    lines = directory.role_log("preflight").read_text().splitlines()
    assert printed.out.splitlines() == lines
    assert [line.partition(" ")[0] for line in lines] == ["trainer", "engines"]
    assert not directory.role_log("replay").exists()


def test_doctor_tells_what_was_compared_and_what_not(config_path: Path, mixed: list[str]) -> None:
    (finding,) = check_preflight(load_config(config_path, mixed))
    assert finding.verdict is Verdict.FAIL
    assert "engines" in finding.figure
    assert "NCCL works with its own version only" in finding.advice
    (finding,) = check_preflight(load_config(config_path, [*mixed, "weights.backend=gloo"]))
    assert finding.verdict is Verdict.OK
    (finding,) = check_preflight(load_config(config_path))
    assert finding.verdict is Verdict.SKIPPED
    assert finding.figure == "the embedded engine computes in the trainer's own environment"


def test_each_generator_of_a_run_is_given_cards_of_its_own(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = load_config(
        config_path,
        ["engine.kind=sglang", "engine.python=p", "launch.num_generators=3"],
    )
    directory = RunDirectory(Path(config.run.output_dir))
    commands = run_commands(config, directory).others("tcp://127.0.0.1:1")
    given = []
    for command in commands:
        overrides = [item for item in command.args if item.startswith(("engine.", "launch."))]
        if command.name.startswith("generator"):
            told = load_config(config_path, ["engine.kind=sglang", "engine.python=p", *overrides])
            given.append((told.engine.device_ids, told.launch.num_generators))
        else:
            assert overrides == []
    assert given == [(["1"], 1), (["2"], 1), (["3"], 1)]
    one = load_config(config_path, ["engine.kind=sglang", "engine.python=p"])
    generator, _ = run_commands(one, directory).others("tcp://127.0.0.1:1")
    assert not any("device_ids" in item for item in generator.args), "it places them itself"


def test_check_tells_the_cards(config_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    sglang = ["engine.kind=sglang", "engine.python=p"]
    assert cli.main(["check", str(config_path), *sglang]) == ExitCode.OK
    assert "trainer GPU-a; engines GPU-b of the 2 cards" in capsys.readouterr().out
    # another machine than the one it is for: told, and no mistake
    assert cli.main(["check", str(config_path), *sglang, "engine.num_engines=7"]) == ExitCode.OK
    assert "a start on this machine would be refused" in capsys.readouterr().out
    assert cli.main(["check", str(config_path)]) == ExitCode.OK
    assert "# cards" not in capsys.readouterr().out
