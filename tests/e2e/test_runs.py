"""Whole runs of real processes on this machine, whole and hurt."""

import json
import signal
import time

import pytest
from real_run import RealRun

from async_grpo.replay.core.records import Made, encode_record
from async_grpo.types import TicketKind

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def assert_sound(run: RealRun, num_steps: int) -> None:
    report = run.audit()
    figures = report.to_json()
    assert report.ok, figures["problems"]
    assert figures["trained"] == 8 * num_steps
    assert figures["duplicates_trained"] == 0
    assert figures["max_staleness_trained"] <= 4
    assert [step["policy_version"] for step in run.steps()] == list(range(1, num_steps + 1))
    assert run.left_over() == []


def test_a_run_is_asynchronous_and_its_books_balance(real_run: RealRun) -> None:
    real_run.start(num_steps=12)
    assert real_run.finish() == 0, real_run.output()
    assert_sound(real_run, 12)
    assert max(step["staleness/max"] for step in real_run.steps()) > 0
    assert (real_run.directory.final_model / "model.safetensors").exists()
    assert "audit        ok" in real_run.output()


def test_in_lockstep_nothing_is_ever_stale(real_run: RealRun) -> None:
    real_run.start("staleness.max_staleness=0", num_steps=5)
    assert real_run.finish() == 0, real_run.output()
    assert_sound(real_run, 5)
    lines = real_run.directory.steps.read_text().splitlines()
    assert [json.loads(line)["max_staleness"] for line in lines] == [0] * 5


@pytest.mark.parametrize("role", ["engine", "generator", "replay"])
def test_a_killed_role_comes_back_and_no_group_is_lost(real_run: RealRun, role: str) -> None:
    real_run.start(num_steps=16)
    real_run.until_step(4)
    killed = real_run.kill(role)
    assert real_run.finish() == 0, real_run.output()
    assert killed in real_run.seen
    assert_sound(real_run, 16)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["ctrl-c", "sigterm"]
)
def test_a_stopped_run_ends_within_ten_seconds(
    real_run: RealRun, number: signal.Signals, code: int
) -> None:
    real_run.start(num_steps=1000)
    real_run.until_step(3)
    real_run.seen |= set(real_run.descendants())
    began = time.monotonic()
    real_run.send(number)
    assert real_run.finish(30) == code, real_run.output()
    assert time.monotonic() - began < 10.0
    assert real_run.left_over() == []
    assert real_run.audit().ok


def test_a_used_run_directory_is_refused(real_run: RealRun) -> None:
    real_run.directory.root.mkdir()
    record = encode_record(Made(group_id=0, prompt_index=0, kind=TicketKind.TRAIN))
    real_run.directory.ledger.write_bytes(record + b"\n")
    real_run.start(num_steps=1)
    assert real_run.finish(30) == 2
    assert "already holds a run" in real_run.output()
