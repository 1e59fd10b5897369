"""Evaluation in the audit: books of its own, and lies about it are named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.analysis.audit import audit
from tests.unit.analysis.test_audit import RunFiles

Json = dict[str, Any]


def claimed(group_id: int, attempt: int = 1) -> Json:
    return {
        "type": "EvalClaimed", "group_id": group_id, "attempt": attempt, "instance": "g0#1",
        "generator": "g0", "number": 1,
    }  # fmt: skip


def ended(group_id: int, attempt: int = 1, *, failed: bool = False) -> Json:
    return {
        "type": "EvalEnded", "group_id": group_id, "attempt": attempt, "failed": failed,
        "detail": "", "weights_tokens": [[[1, 0], 5]],
        "stats": {"num_completions": 1, "num_tokens": 5, "reward_sum": 1.0},
    }  # fmt: skip


def evaluated_run() -> RunFiles:
    """Three tickets: one evaluated, one failed at its second attempt, one claimed."""
    files = RunFiles()
    files.ledger += [
        {"type": "EvalOpened", "weights": [1, 0], "first_group_id": -1, "num_prompts": 3},
        claimed(-1), ended(-1),
        claimed(-2), {"type": "EvalReissued", "group_id": -2, "attempt": 1},
        claimed(-2, 2), ended(-2, 2, failed=True),
        claimed(-3),
    ]  # fmt: skip
    files.log.append({"event": "evaluated", "group_id": -1, "attempt": 1, "num_tokens": 5})
    return files


def test_counted_apart(tmp_path: Path) -> None:
    with_evaluation = audit(evaluated_run().write(tmp_path))

    assert with_evaluation.problems == []
    assert with_evaluation.evaluation == {
        "rounds": 1, "tickets": 3, "evaluated": 1, "failed": 1, "open": 1,
    }  # fmt: skip
    assert with_evaluation.tickets == 4
    assert "evaluation: evaluated 1, failed 1, open 1" in with_evaluation.to_text()


def test_a_new_trainer_fails_what_was_open(tmp_path: Path) -> None:
    files = evaluated_run()
    files.ledger.append(
        {
            "type": "TrainerStarted",
            "incarnation": 2,
            "restored_version": 2,
            "restored_incarnation": 1,
            "instance": "t2",
        }
    )

    report = audit(files.write(tmp_path))

    assert report.problems == []
    assert report.evaluation["failed"] == 2
    assert report.evaluation["open"] == 0


def end_twice(files: RunFiles) -> None:
    files.ledger.append(ended(-1))


def end_unclaimed(files: RunFiles) -> None:
    files.ledger.append(ended(-4))


def skip_ids(files: RunFiles) -> None:
    files.find("EvalOpened")["first_group_id"] = -2


def open_early(files: RunFiles) -> None:
    files.ledger.append(
        {"type": "EvalOpened", "weights": [1, 1], "first_group_id": -4, "num_prompts": 3}
    )


def wrong_tokens(files: RunFiles) -> None:
    files.log[-1]["num_tokens"] = 6


def unwritten(files: RunFiles) -> None:
    del files.log[-1]


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        (end_twice, "eval group -1, attempt 1 must be claimed"),
        (end_unclaimed, "eval group -4, attempt 1 must be claimed, but it is None"),
        (skip_ids, "eval round of 3 tickets from -2 on, after 0"),
        (open_early, "an eval round began while 1 eval tickets were open"),
        (wrong_tokens, "with 5 tokens, the generators' logs say [6]"),
        (unwritten, "the generators' logs say nothing"),
    ],
)
def test_lie_is_named(tmp_path: Path, lie: Callable[[RunFiles], None], named: str) -> None:
    files = evaluated_run()
    lie(files)

    report = audit(files.write(tmp_path))

    assert any(named in problem for problem in report.problems), report.problems
