"""The command line: what it imports, how it parses, and what its exit codes say."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from async_grpo.config.load import load_config
from async_grpo.errors import AsyncGrpoError, ConfigError, ExitCode, NumericsError, PeerLost
from async_grpo.launch import cli
from async_grpo.launch.check import describe, objective_line
from async_grpo.launch.prepare import prepare


@pytest.mark.parametrize(
    "command", ["", "run", "replay", "generator", "trainer", "engine", "prepare", "check"]
)
def test_help_imports_no_torch_and_is_quick(command: str) -> None:
    code = (
        "import sys, async_grpo.launch.cli as cli\n"
        f"try: cli.main([*{command.split()}, '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "slow = {'torch', 'transformers', 'omegaconf', 'zmq'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert (command or "prepare") in done.stdout
    # seconds of the processor: those of the clock depend on who else computes
    assert used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_check_imports_no_torch(config_path: Path) -> None:
    code = (
        "import sys, async_grpo.launch.cli as cli\n"
        f"assert cli.main(['check', {str(config_path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=50)


def test_a_reader_that_has_seen_enough_is_no_error(config_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    args = [sys.executable, "-m", "async_grpo", "check", str(config_path)]
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run(args, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["run", "replay", "generator", "trainer", "engine", "check"])
def test_every_command_refuses_a_wrong_configuration_whole(command: str, config_path: Path) -> None:
    overrides = ["generation.group_size=1", "trainer.lr=-1", "staleness.max_stalenes=3"]
    args = [sys.executable, "-m", "async_grpo", command, str(config_path), *overrides]
    done = subprocess.run(args, capture_output=True, text=True, timeout=50)
    assert done.returncode == ExitCode.CONFIG
    assert "max_stalenes" in done.stderr
    assert "Traceback" not in done.stderr


def test_overrides_may_follow_an_option() -> None:
    args = cli._parse(["generator", "c.yaml", "--name", "g", "run.seed=1"])
    assert (args.config, args.name, args.overrides) == ("c.yaml", "g", ["run.seed=1"])
    args = cli._parse(["generator", "c.yaml", "run.seed=1", "--name", "g", "run.seed=2"])
    assert args.overrides == ["run.seed=1", "run.seed=2"]


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli._parse(["check", "c.yaml", "--jsno"])
    assert "--jsno" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(["a.b must be > 0", "c.d is missing"]), 2),
        (PeerLost("the replay server is gone"), 3),
        (NumericsError("the loss is not finite"), 4),
        (AsyncGrpoError("something else"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_args: object) -> ExitCode:
        raise error

    monkeypatch.setattr(cli, "_check", fail)
    assert cli.main(["check", "c.yaml"]) == code
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "make room"), (errno.EROFS, "choose another"), (errno.EMFILE, "ulimit -n")],
)
def test_a_refusal_of_the_system_is_told_with_what_to_do(
    number: int,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_args: object) -> ExitCode:
        raise OSError(number, os.strerror(number), "/some/file")

    monkeypatch.setattr(cli, "_check", fail)
    assert cli.main(["check", "c.yaml"]) == ExitCode.OTHER
    told = capsys.readouterr().err
    assert f"{os.strerror(number)} (/some/file); " in told
    assert advice in told


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_args: object) -> ExitCode:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "_check", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["check", "c.yaml"])


def test_more_ranks_than_one_are_refused(config_path: Path) -> None:
    args = [sys.executable, "-m", "async_grpo", "trainer", str(config_path), "--nproc", "2"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=50)
    assert done.returncode == ExitCode.CONFIG
    assert "one rank in this version" in done.stderr


def test_a_name_must_fit_in_file_names(config_path: Path) -> None:
    args = [sys.executable, "-m", "async_grpo", "generator", str(config_path), "--name", "a/b"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=50)
    assert done.returncode == ExitCode.CONFIG
    assert "a/b" in done.stderr


def test_check_prints_a_configuration_and_what_follows(config_path: Path) -> None:
    text = describe(load_config(config_path, ["replay.groups_per_step=8"]))
    assert "24 groups in flight and stored ((D + 1) * P = 3 * 8)" in text
    assert "one update per step; the bound is behavior_weight <= 2" in text
    again = config_path.with_name("again.yaml")
    again.write_text(text)
    assert describe(load_config(again)) == text


def test_check_says_when_the_clip_is_not_inert(config_path: Path) -> None:
    text = describe(load_config(config_path, ["trainer.updates_per_step=2"]))
    assert "clip inert" not in text


def test_check_describes_the_evaluation_when_there_is_one(config_path: Path) -> None:
    assert "evaluation" not in describe(load_config(config_path)).replace("eval:", "")
    text = describe(load_config(config_path, ["eval.every=5", "eval.num_prompts=7"]))
    assert "# evaluation            7 held-out prompts * 1 completions every 5 steps; 5%" in text


def test_check_reads_the_model_without_torch(config_path: Path, tmp_path: Path) -> None:
    model = tmp_path / "out" / "model"
    model.mkdir(parents=True)
    save_file({"a": np.zeros((10, 100), np.float32), "b": np.zeros(24, np.float32)},
              model / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "hidden_size": 96, "max_position_embeddings": 64}  # fmt: skip
    (model / "config.json").write_text(json.dumps(shape))
    text = describe(load_config(config_path, ["engine.max_running_requests=8"]))
    assert "1,024 parameters" in text
    assert "4 KiB to each engine, 5 publishes" in text
    assert "# trainer: state        16 KiB" in text
    # 2 (k, v) * 2 layers * 2 heads * 24 numbers * 4 bytes * 8 requests * 64 tokens
    assert f"# engine: KV cache      {192 * 4 * 512 / 1024:g} KiB (512 tokens within" in text


def test_a_broken_model_file_is_named(config_path: Path, tmp_path: Path) -> None:
    model = tmp_path / "out" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        describe(load_config(config_path))


def test_the_objective_is_one_line(config_path: Path) -> None:
    line = objective_line(load_config(config_path, ["algorithm.kl_coef=0.01"]))
    assert "\n" not in line
    for part in ("[0.8, 1.28]", "dual clip 3", "behavior_weight <= 2", "token_mean", "0.01 * k3"):
        assert part in line


def make_half(directory: Path, _seed: int, _options: Mapping[str, Any]) -> None:
    directory.mkdir()
    raise RuntimeError("out of disk")


def make_whole(directory: Path, seed: int, options: Mapping[str, Any]) -> None:
    directory.mkdir()
    (directory / "note").write_text(f"{seed} {options['size']}")


def test_prepare_makes_the_model_once(config_path: Path, tmp_path: Path) -> None:
    maker = [f"policy.maker={__name__}:make_whole", "policy.maker_options.size=3", "run.seed=7"]
    prepare(load_config(config_path, maker))
    assert (tmp_path / "out" / "model" / "note").read_text() == "7 3"
    prepare(load_config(config_path, [*maker, "run.seed=8"]))
    assert (tmp_path / "out" / "model" / "note").read_text() == "7 3"


def test_an_interrupted_prepare_leaves_no_model(config_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="failed: RuntimeError: out of disk"):
        prepare(load_config(config_path, [f"policy.maker={__name__}:make_half"]))
    assert not (tmp_path / "out" / "model").exists()
    prepare(
        load_config(
            config_path, [f"policy.maker={__name__}:make_whole", "policy.maker_options.size=1"]
        )
    )
    assert (tmp_path / "out" / "model").exists()
