"""What may change between a run and its continuation, and what the refusal says."""

import json
from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from async_grpo.config.resume import differences, fixed_values, resume_problems, values_digest

BASE = "run: {output_dir: out, num_train_steps: 10}\npolicy: {model: m}\ntask: {name: reverse}\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(BASE)
    return path


@pytest.mark.parametrize(
    "change",
    [
        "run.num_train_steps=11", "run.no_progress_timeout_s=5", "replay.address=tcp://host:1",
        "replay.max_bytes=2000000000", "trainer.threads=2", "trainer.checkpoint_every=1",
        "engine.max_running_requests=4", "launch.max_restarts=9", "metrics.tensorboard=false",
        "weights.timeout_s=7", "generation.group_timeout_s=9",
    ],
)  # fmt: skip
def test_what_changes_no_result_may_change(base: Path, change: str) -> None:
    assert resume_problems(load_config(base), load_config(base, [change])) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("trainer.lr=0.5", "trainer.lr: the run has 1e-06, now it is 0.5"),
        ("run.seed=3", "run.seed: the run has 0, now it is 3"),
        ("policy.model=other", "policy.model: the run has 'm', now it is 'other'"),
        ("task.name=arithmetic", "task.name: the run has 'reverse', now it is 'arithmetic'"),
        ("task.options.length=9", "task.options: the run has {}, now it is {'length': 9}"),
        ("generation.group_size=4", "generation.group_size: the run has 8, now it is 4"),
        ("replay.groups_per_step=8", "replay.groups_per_step: the run has 16, now it is 8"),
        ("staleness.max_staleness=6", "staleness.max_staleness: the run has 4, now it is 6"),
        ("policy.dtype=bfloat16", "policy.dtype: the run has 'float32', now it is 'bfloat16'"),
        ("algorithm.clip_high=0.3", "algorithm.clip_high: the run has 0.28, now it is 0.3"),
        ("weights.publish_every=2", "weights.publish_every: the run has 1, now it is 2"),
        ("eval.every=5", "eval.every: the run has 0, now it is 5"),
        ("run.num_train_steps=9", "run.num_train_steps may grow: the run has 10, now it is 9"),
    ],
)  # fmt: skip
def test_what_changes_the_results_is_named_with_both_values(
    base: Path, change: str, problem: str
) -> None:
    assert resume_problems(load_config(base), load_config(base, [change])) == [problem]


def test_all_differences_are_reported_at_once(base: Path) -> None:
    changed = load_config(base, ["run.seed=1", "trainer.lr=0.5", "run.num_train_steps=2"])
    assert len(resume_problems(load_config(base), changed)) == 3


def test_a_field_that_only_one_side_knows_is_a_difference(base: Path) -> None:
    values = fixed_values(load_config(base))
    fewer = {name: value for name, value in values.items() if name != "trainer.lr"}
    assert differences(fewer, values) == ["trainer.lr: the run has 'nothing', now it is 1e-06"]
    assert values_digest(fewer) != values_digest(values)


def test_infinite_values_survive_json(base: Path) -> None:
    config = load_config(base)
    config.algorithm.clip_high = float("inf")
    values = fixed_values(config)
    assert values["algorithm.clip_high"] == "Infinity"
    assert json.loads(json.dumps(values, allow_nan=False)) == values
