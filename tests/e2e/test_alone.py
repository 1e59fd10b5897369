"""Roles that are started by hand, in every order, and a generator that joins and leaves."""

import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminals import Terminals

from async_grpo.analysis.audit import audit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]

READY = {
    "replay": "listening at",
    "trainer": "connecting to the",
    "generator": "connecting to the",
}
"""What each has said once it waits for the others."""


@pytest.fixture
def terminals(tmp_path: Path, toy_model: Path) -> Iterator[Terminals]:
    found = Terminals(tmp_path, toy_model)
    yield found
    found.end()


@pytest.mark.parametrize("order", list(itertools.permutations(READY)), ids="-".join)
def test_any_order(terminals: Terminals, order: tuple[str, ...]) -> None:
    for role in order:
        terminals.start(role, *(["--name", "generator-0"] if role == "generator" else []))
        said = READY[role]
        terminals.until(lambda name=role, text=said: text in terminals.output(name), f"{role}")
    terminals.finish()
    report = audit(terminals.directory.root)
    assert report.ok, report.to_json()["problems"]
    assert report.to_json()["trained"] == 3 * 8
    assert terminals.directory.config.exists()
    for name in ("replay", "trainer", "generator-0"):
        assert terminals.directory.role_log(name).stat().st_size > 0


def test_a_role_says_whom_it_waits_for(terminals: Terminals) -> None:
    terminals.start("generator", "--name", "generator-0")
    line = "waiting for the replay server at tcp://127.0.0.1"
    terminals.until(lambda: line in terminals.output("generator"), "a line about the server")
    assert "s left (run.no_progress_timeout_s)" in terminals.output("generator")
    terminals.start("replay")
    line = "waiting for a trainer to publish its first weights"
    terminals.until(lambda: line in terminals.output("generator"), "a line about the trainer")
    terminals.processes["generator"].terminate()
    terminals.processes["replay"].terminate()
    terminals.finish(20)


def test_a_second_generator_joins_and_leaves(terminals: Terminals) -> None:
    steps = "run.num_train_steps=100000"  # it is stopped
    terminals.start("replay", steps)
    terminals.start("trainer", steps)
    terminals.start("generator", steps, "--name", "generator-0")
    terminals.until(lambda: terminals.num_steps() >= 3, "step 3")
    terminals.start("generator", steps, "--name", "generator-1", name="second")
    witness = terminals.directory.generator_log("generator-1")

    def delivered() -> bool:
        if not witness.exists():
            return False
        lines = [json.loads(line) for line in witness.read_bytes().split(b"\n")[:-1]]
        return any(line["event"] == "answered" for line in lines)

    terminals.until(delivered, "group of the second generator")
    terminals.processes["second"].terminate()
    assert terminals.processes["second"].wait(20) == 0, terminals.output("second")
    before = terminals.num_steps()
    terminals.until(lambda: terminals.num_steps() > before, "step without the second generator")
    for name in ("trainer", "generator", "replay"):
        terminals.processes[name].terminate()
        assert terminals.processes[name].wait(60) == 0, terminals.output(name)
    report = audit(terminals.directory.root)
    assert report.ok, report.to_json()["problems"]
    assert report.to_json()["trained"] == terminals.num_steps() * 8


def test_a_killed_trainer_is_started_again_by_hand(terminals: Terminals) -> None:
    settings = ("run.num_train_steps=10", "trainer.checkpoint_every=3")
    terminals.start("replay", *settings)
    terminals.start("trainer", *settings)
    terminals.start("generator", *settings, "--name", "generator-0")
    terminals.until(lambda: terminals.num_steps() >= 5, "step 5")
    killed = terminals.processes.pop("trainer")
    killed.kill()
    assert killed.wait(20) == -signal.SIGKILL
    terminals.start("trainer", *settings, name="trainer-again")
    terminals.finish()
    report = audit(terminals.directory.root)
    assert report.ok, report.to_json()["problems"]
    assert (report.trained, report.duplicates_trained) == (10 * 8, 0)
    steps = [json.loads(line) for line in terminals.directory.metrics.read_text().splitlines()]
    assert [step["policy_version"] for step in steps] == list(range(1, 11))
    restored = next(step["step"] for step in steps if step["incarnation"] == 2)
    assert restored in (3, 6), "it goes on from a checkpoint"


def test_ctrl_c_in_each_terminal(terminals: Terminals) -> None:
    settings = ("run.num_train_steps=100000", "trainer.checkpoint_every=0")
    terminals.start("replay", *settings)
    terminals.start("trainer", *settings)
    terminals.start("generator", *settings, "--name", "generator-0")
    terminals.until(lambda: terminals.num_steps() >= 3, "step 3")
    for name in ("trainer", "generator", "replay"):
        assert terminals.ctrl_c(name) == 130, terminals.output(name)
        assert "Traceback" not in terminals.output(name), terminals.output(name)
    num_steps = terminals.num_steps()
    assert (terminals.directory.checkpoints / f"1.{num_steps}").is_dir(), "nothing is lost"
    report = audit(terminals.directory.root)
    assert report.ok, report.to_json()["problems"]
    assert report.trained == num_steps * 8
    assert not report.to_json()["dropped"].get("reward_failed"), "a Ctrl-C is no failed reward"
