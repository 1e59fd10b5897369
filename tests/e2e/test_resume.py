"""Runs that were hurt or interrupted go on, lose at most what no checkpoint holds, and add up."""

import json
import signal

import pytest
from real_run import RealRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def assert_whole(run: RealRun, num_steps: int, *, trainers: int) -> None:
    """Every step once, trained by one trainer or the next, and all witnesses agree."""
    report = run.audit()
    assert report.ok, report.problems
    assert report.trained == 8 * num_steps
    assert (report.steps, report.duplicates_trained) == (num_steps, 0)
    assert report.max_staleness_trained <= 4
    steps = run.steps()
    assert [step["policy_version"] for step in steps] == list(range(1, num_steps + 1))
    assert [step["incarnation"] for step in steps] == sorted(s["incarnation"] for s in steps)
    assert steps[-1]["incarnation"] == trainers
    assert run.left_over() == []


def restores(run: RealRun) -> list[tuple[int, int]]:
    """(incarnation, policy_version) that each trainer went on from."""
    lines = [json.loads(line) for line in run.directory.ledger.read_text().splitlines()]
    return [
        (line.get("restored_incarnation", 0), line["restored_version"])
        for line in lines
        if line["type"] == "TrainerStarted"
    ]


def test_a_killed_trainer_goes_on_from_its_checkpoint(real_run: RealRun) -> None:
    real_run.start("trainer.checkpoint_every=3", num_steps=14)
    real_run.until_step(8)
    real_run.kill("trainer")
    assert real_run.finish() == 0, real_run.output()
    assert "trainer was killed by SIGKILL; restart 1 of 3" in real_run.output()
    first, second = restores(real_run)
    assert first == (0, 0)
    assert second[0] == 1
    assert second[1] in (6, 9)
    assert_whole(real_run, 14, trainers=2)


def test_a_trainer_killed_before_its_first_checkpoint_begins_anew(real_run: RealRun) -> None:
    real_run.start("trainer.checkpoint_every=0", num_steps=8)
    real_run.until_step(3)
    real_run.kill("trainer")
    assert real_run.finish() == 0, real_run.output()
    assert restores(real_run) == [(0, 0), (0, 0)]
    assert real_run.audit().tokens["rolled_back"] > 0
    assert_whole(real_run, 8, trainers=2)


def test_an_interrupted_run_is_resumed_where_it_stopped(real_run: RealRun) -> None:
    real_run.start("trainer.checkpoint_every=0", num_steps=30)
    real_run.until_step(4)
    real_run.send(signal.SIGINT)
    assert real_run.finish(30) == 130, real_run.output()
    stopped_at = len(real_run.steps())
    assert stopped_at < 30

    real_run.start(num_steps=30)
    assert real_run.finish(60) == 2
    assert "continue it with --resume" in real_run.output()
    real_run.start("--resume", "trainer.lr=0.5", num_steps=30)
    assert real_run.finish(60) == 2
    assert "--resume: trainer.lr: the run has 0.0003, now it is 0.5" in real_run.output()

    real_run.start("--resume", num_steps=30)
    assert real_run.finish() == 0, real_run.output()
    assert restores(real_run) == [(0, 0), (1, stopped_at)]  # a clean stop loses nothing
    assert_whole(real_run, 30, trainers=2)


def test_a_finished_run_goes_on_with_more_steps_only(real_run: RealRun) -> None:
    real_run.start(num_steps=3)
    assert real_run.finish() == 0, real_run.output()
    real_run.start("--resume", num_steps=3)
    assert real_run.finish(60) == 2
    assert "all 3 train steps" in real_run.output()

    real_run.start("--resume", num_steps=5)
    assert real_run.finish() == 0, real_run.output()
    assert restores(real_run) == [(0, 0), (1, 3)]
    assert_whole(real_run, 5, trainers=2)
