"""A whole run that evaluates, keeps samples, and is exported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_run import RealRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

EVALUATION = ("eval.every=4", "eval.num_prompts=6", "eval.held_out_fraction=0.2")


def command(*args: object) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "async_grpo", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_a_run_evaluates_beside_training(real_run: RealRun, tmp_path: Path) -> None:
    real_run.start(*EVALUATION, num_steps=10)
    assert real_run.finish() == 0, real_run.output()
    report = real_run.audit()
    assert report.ok, report.problems
    evaluation = report.evaluation
    assert evaluation["tickets"] == evaluation["evaluated"] == 6 * evaluation["rounds"]
    assert report.trained == 80

    lines = real_run.steps()
    versions = [line["eval/policy_version"] for line in lines if "eval/reward_mean" in line]
    assert versions[0] == 0
    assert versions[-1] == 10
    assert versions == sorted(set(versions))
    assert len(versions) == evaluation["rounds"] >= 2
    assert all(0 <= line["eval/reward_mean"] <= 1 for line in lines if "eval/reward_mean" in line)

    samples = [json.loads(line) for line in real_run.directory.samples.read_text().splitlines()]
    prompts = {kind: {s["prompt"] for s in samples if s["kind"] == kind} for kind in
               ("train", "eval")}  # fmt: skip
    assert prompts["train"]
    assert prompts["eval"]
    assert prompts["train"].isdisjoint(prompts["eval"])

    shown = command("samples", real_run.directory.root, "--step", 0)
    assert shown.returncode == 0, shown.stderr
    assert "=== step 0, " in shown.stdout
    exported = command("export", real_run.directory.root, tmp_path / "exported")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_evaluation_goes_on_after_its_generator_died(real_run: RealRun) -> None:
    real_run.start(*EVALUATION, num_steps=16)
    real_run.until_step(4)
    real_run.kill("generator")
    assert real_run.finish() == 0, real_run.output()
    report = real_run.audit()
    assert report.ok, report.problems
    assert report.evaluation["open"] == 0
    lines = real_run.steps()
    assert lines[-1]["eval/policy_version"] == 16


def test_a_restarted_trainer_evaluates_where_it_goes_on(real_run: RealRun) -> None:
    real_run.start(*EVALUATION, "trainer.checkpoint_every=3", num_steps=12)
    real_run.until_step(5)
    real_run.kill("trainer")
    assert real_run.finish() == 0, real_run.output()
    report = real_run.audit()
    assert report.ok, report.problems
    assert report.evaluation["open"] == 0
    lines = [line for line in real_run.steps() if "eval/reward_mean" in line]
    restored = [
        record["restored_version"]
        for record in map(json.loads, real_run.directory.ledger.read_text().splitlines())
        if record["type"] == "TrainerStarted"
    ]
    assert len(restored) == 2
    second = [line["eval/policy_version"] for line in lines if line["incarnation"] == 2]
    assert second[0] == restored[1]
    assert second[-1] == 12
    assert second == sorted(set(second))
