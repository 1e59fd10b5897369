import json
from pathlib import Path

from async_grpo.config.load import load_config
from async_grpo.config.run_directory import RunDirectory
from async_grpo.errors import ExitCode
from async_grpo.launch.summary import summarize
from async_grpo.launch.supervisor import Outcome

CONFIG = "run: {output_dir: ROOT, num_train_steps: 4}\npolicy: {model: m}\ntask: {name: reverse}\n"


def text_of(tmp_path: Path, *lines: dict[str, float]) -> str:
    directory = RunDirectory(tmp_path)
    directory.config.write_text(CONFIG.replace("ROOT", str(tmp_path)))
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = Outcome(ExitCode.OK, "done")
    return summarize(load_config(directory.config), directory, outcome, {}).text


def test_first_and_last_evaluation_are_told_and_are_no_steps(tmp_path: Path) -> None:
    text = text_of(
        tmp_path,
        {"step": 0, "reward/mean": 0.1, "eval/reward_mean": 0.2, "eval/policy_version": 0},
        {"step": 1, "reward/mean": 0.3, "eval/reward_mean": 0.4, "eval/policy_version": 1},
        {"step": 2, "eval/reward_mean": 0.5, "eval/policy_version": 2},
    )

    assert "  steps        2 of 4" in text
    assert "  reward       0.200 (first 2 steps)" in text
    assert "  evaluation   0.200 (version 0) -> 0.500 (version 2)" in text


def test_without_evaluation_there_is_no_such_line(tmp_path: Path) -> None:
    assert "\n  evaluation " not in text_of(tmp_path, {"step": 0, "reward/mean": 0.1})
