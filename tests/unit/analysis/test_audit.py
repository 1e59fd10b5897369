"""Each test tells one lie to `audit`, in a small run directory, and expects it to be named."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.analysis.audit import AuditReport, audit
from async_grpo.errors import ConfigError

Json = dict[str, Any]

CONFIG = """
run: {output_dir: run, num_train_steps: 3}
policy: {model: toy}
task: {name: reverse}
replay: {groups_per_step: 1}
staleness: {max_staleness: 1, pipeline_depth: 1}
"""


class RunFiles:
    """The witnesses of a run, to be changed and then written."""

    def __init__(self, config: str = CONFIG) -> None:
        self.config = config
        self.ledger: list[Json] = [
            {"type": "DatasetAgreed", "fingerprint": "f", "num_prompts": 9},
            {"type": "TrainerStarted", "incarnation": 1, "restored_version": 0, "instance": "t"},
            announced(1, 1, [1, 0]),
            {"type": "WentLive", "weights": [1, 0], "publish_sequence": 1},
        ]
        for group_id in range(4):
            self.ledger += [made(group_id), claimed(group_id, 1)]
        self.ledger += [
            stored(0, 1, [[1, 0]]),
            stored(1, 1, [[1, 0]]),
            {"type": "Dropped", "group_id": 2, "attempt": 1, "reason": "no_signal"},
            {"type": "Reissued", "group_id": 3, "attempt": 1, "reason": "claim_lost"},
            drawn(1, 0, 0, [1, 0]),
            trained(0, 1, 0),
            announced(2, 2, [1, 1]),
            {"type": "WentLive", "weights": [1, 1], "publish_sequence": 2},
            drawn(2, 1, 1, [1, 0]),
            trained(1, 2, 1),
        ]
        self.steps: list[Json] = [step(0, 1, 0, "1.0", 0), step(1, 2, 1, "1.0", 1)]
        self.log: list[Json] = [sent(0), answered(0), sent(1), answered(1)]

    def write(self, directory: Path) -> Path:
        """Write them as a run directory."""
        (directory / "logs").mkdir()
        (directory / "config.yaml").write_text(self.config)
        for name, lines in (
            ("ledger.jsonl", self.ledger),
            ("steps.jsonl", self.steps),
            ("logs/g0.groups.jsonl", self.log),
        ):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (directory / name).write_text(text)
        return directory

    def find(self, kind: str, number: int = 0) -> Json:
        """The n-th ledger record of a type."""
        return [record for record in self.ledger if record["type"] == kind][number]


def made(group_id: int) -> Json:
    return {"type": "Made", "group_id": group_id, "prompt_index": group_id, "kind": "train"}


def claimed(group_id: int, attempt: int) -> Json:
    return {
        "type": "Claimed", "group_id": group_id, "attempt": attempt, "instance": "g0#1",
        "generator": "g0", "number": group_id + 1,
    }  # fmt: skip


def stored(group_id: int, attempt: int, names: list[list[int]]) -> Json:
    summary = {
        "group_id": group_id, "attempt": attempt, "num_bytes": 10, "num_completions": 2,
        "num_tokens": 5, "reward_sum": 1.0, "weights_tokens": [[name, 5] for name in names],
    }  # fmt: skip
    return {"type": "Stored", "summary": summary}


def drawn(number: int, version: int, group_id: int, oldest: list[int]) -> Json:
    group = {
        "group_id": group_id, "attempt": 1, "prompt_index": group_id, "num_bytes": 10,
        "num_tokens": 5, "oldest": oldest, "in_queue_s": 0.5,
    }  # fmt: skip
    return {
        "type": "Drawn", "incarnation": 1, "draw_number": number, "train_version": version,
        "groups": [group], "generated": {},
    }  # fmt: skip


def trained(step_number: int, draw_number: int, group_id: int, incarnation: int = 1) -> Json:
    return {
        "type": "Trained", "incarnation": incarnation, "step": step_number,
        "draw_number": draw_number, "groups": [[group_id, 1]],
    }  # fmt: skip


def announced(number: int, sequence: int, weights: list[int]) -> Json:
    return {
        "type": "Announced", "incarnation": 1, "number": number, "publish_sequence": sequence,
        "weights": weights, "cells": [],
    }  # fmt: skip


def step(number: int, draw_number: int, group_id: int, oldest: str, staleness: int) -> Json:
    group = {
        "group_id": group_id, "attempt": 1, "num_tokens": 5, "num_over_age": 0,
        "oldest": oldest, "staleness": staleness,
    }  # fmt: skip
    return {
        "incarnation": 1, "step": number, "policy_version": number + 1,
        "draw_number": draw_number, "num_tokens": 5, "max_staleness": staleness,
        "groups": [group],
    }  # fmt: skip


def restarted(incarnation: int, version: int, restored_incarnation: int) -> Json:
    return {
        "type": "TrainerStarted", "incarnation": incarnation, "restored_version": version,
        "restored_incarnation": restored_incarnation, "instance": "t2",
    }  # fmt: skip


def settled(version: int) -> Json:
    return {"type": "Settled", "incarnation": 1, "policy_version": version}


def sent(group_id: int) -> Json:
    return {
        "event": "sent", "group_id": group_id, "attempt": 1, "num_tokens": 5, "oldest": "1.0",
    }  # fmt: skip


def answered(group_id: int) -> Json:
    return {**sent(group_id), "event": "answered", "outcome": "stored"}


def audited(files: RunFiles, directory: Path) -> AuditReport:
    return audit(files.write(directory))


def test_honest_run_is_ok(tmp_path: Path) -> None:
    report = audited(RunFiles(), tmp_path)

    assert report.problems == []
    told = report.to_json()
    assert told["ok"] is True
    assert (told["tickets"], told["trained"], told["open"]) == (4, 2, 1)
    assert told["dropped"] == {"no_signal": 1}
    assert told["reissued"] == {"claim_lost": 1}
    assert told["duplicates_trained"] == 0
    assert told["max_staleness_trained"] == 1
    assert told["tokens"] == {"stored": 10, "trained": 10}
    assert "audit: ok" in report.to_text()
    json.dumps(told)


def test_a_depth_that_the_trainer_set_is_no_problem(tmp_path: Path) -> None:
    files = RunFiles()
    files.ledger += [depth_set(0), depth_set(1)]

    assert audited(files, tmp_path).problems == []


def test_rolled_back_steps_are_not_duplicates(tmp_path: Path) -> None:
    files = RunFiles()
    restart = restarted(2, 1, 1)
    files.ledger += [
        restart,
        {**announced(1, 3, [2, 1]), "incarnation": 2},
        claimed(1, 2),
        stored(1, 2, [[2, 1]]),
    ]
    again = drawn(3, 1, 1, [2, 1])
    again["groups"][0]["attempt"] = 2
    files.ledger += [
        {**again, "incarnation": 2},
        {**trained(1, 3, 1, incarnation=2), "groups": [[1, 2]]},
    ]
    second = step(1, 3, 1, "2.1", 0)
    second["groups"][0]["attempt"] = 2
    files.steps.append({**second, "incarnation": 2})
    files.log.append({**sent(1), "attempt": 2})

    report = audited(files, tmp_path)

    assert report.problems == []
    assert report.reissued == {"claim_lost": 1, "rolled_back": 1}
    assert report.tokens == {"stored": 15, "trained": 10, "rolled_back": 5}


def test_a_step_that_several_trainers_wrote_counts_once(tmp_path: Path) -> None:
    files = RunFiles()
    files.ledger += [restarted(2, 1, 1), restarted(3, 1, 1)]
    files.steps.append({**step(1, 2, 1, "1.0", 1), "incarnation": 2})  # died before its ack

    report = audited(files, tmp_path)

    assert report.problems == []
    assert (report.steps, report.trained, report.open) == (1, 1, 2)


def test_settled_steps_may_be_restored_at_their_end(tmp_path: Path) -> None:
    files = RunFiles()
    files.ledger += [settled(1), settled(2), restarted(2, 2, 1)]

    assert audited(files, tmp_path).problems == []


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([settled(3)], "steps before 3 are settled after 0, with 2 steps acked"),
        ([settled(1), settled(1)], "steps before 1 are settled after 1"),
        ([settled(2), restarted(2, 1, 1)], "restored 1, steps before 2 are final"),
        ([restarted(2, 3, 1)], "restored 3, only 2 steps are acked"),
        ([restarted(2, 1, 0)], "restored 0.1, which was undone"),
        ([restarted(2, 1, 1), restarted(3, 1, 2), restarted(4, 1, 9)], "restored 9.1"),
        ([restarted(2, 0, 0), restarted(3, 1, 1)], "restored 1.1, which was undone"),
    ],
)
def test_a_restore_that_the_ledger_forbids_is_named(
    records: list[Json], problem: str, tmp_path: Path
) -> None:
    files = RunFiles()
    files.ledger += records
    assert any(problem in found for found in audited(files, tmp_path).problems)


def test_torn_last_lines_are_no_problem(tmp_path: Path) -> None:
    RunFiles().write(tmp_path)
    for name in ("ledger.jsonl", "steps.jsonl", "logs/g0.groups.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"type": "Cla')

    assert audit(tmp_path).problems == []


def test_step_written_but_never_acked_is_no_problem(tmp_path: Path) -> None:
    files = RunFiles()
    files.steps.append(step(2, 3, 3, "1.1", 1))

    assert audited(files, tmp_path).problems == []


def _double_train(files: RunFiles) -> None:
    files.ledger += [drawn(3, 2, 0, [1, 0]), trained(2, 3, 0)]
    files.steps.append(step(2, 3, 0, "1.0", 2))


def _too_stale(files: RunFiles) -> None:
    record = files.find("Stored", 1)
    record["summary"]["weights_tokens"] = [[[1, -1], 5]]


def _from_the_future(files: RunFiles) -> None:
    record = files.find("Stored", 1)
    record["summary"]["weights_tokens"] = [[[1, 0], 2], [[1, 2], 3]]


def _step_log_negative(files: RunFiles) -> None:
    group = files.steps[0]["groups"][0]
    group["staleness"] = files.steps[0]["max_staleness"] = -16


def _named_twice(files: RunFiles) -> None:
    files.ledger += [{"type": "RunNamed", "token": token} for token in ("x-1", "y-2")]


def _sequence_repeats(files: RunFiles) -> None:
    files.find("Announced", 1)["publish_sequence"] = 1


def _trained_unstored(files: RunFiles) -> None:
    files.ledger.remove(files.find("Stored", 0))


def _ticket_ends_twice(files: RunFiles) -> None:
    files.ledger.append({**files.find("Dropped"), "reason": "stale"})


def _ticket_reopened_after_its_end(files: RunFiles) -> None:
    files.ledger.append({**files.find("Reissued"), "group_id": 2})


def _late_insert_of_a_fenced_attempt(files: RunFiles) -> None:
    files.ledger += [claimed(3, 2), stored(3, 1, [[1, 1]])]
    files.log.append(sent(3))


def _ack_of_other_groups(files: RunFiles) -> None:
    files.find("Trained", 1)["draw_number"] = 1


def _off_lineage(files: RunFiles) -> None:
    start = {**files.find("TrainerStarted"), "incarnation": 2}
    files.ledger.insert(2, start)
    for record in files.ledger:
        if record["type"] in ("Trained", "Drawn"):
            record["incarnation"] = 2
    files.find("Stored", 1)["summary"]["weights_tokens"] = [[[1, 1], 5]]


def _fenced_incarnation_acks(files: RunFiles) -> None:
    files.find("Trained", 1)["incarnation"] = 2


def _unknown_weights_live(files: RunFiles) -> None:
    files.find("WentLive", 1)["weights"] = [1, 7]


def _step_log_missing_a_step(files: RunFiles) -> None:
    files.steps.pop()


def _step_log_other_groups(files: RunFiles) -> None:
    files.steps[1]["groups"][0]["group_id"] = 3


def _step_log_other_attempt(files: RunFiles) -> None:
    files.steps[1]["groups"][0]["attempt"] = 2


def _step_log_other_tokens(files: RunFiles) -> None:
    files.steps[0]["groups"][0]["num_tokens"] = files.steps[0]["num_tokens"] = 6


def _step_log_wrong_sum(files: RunFiles) -> None:
    files.steps[0]["num_tokens"] = 6


def _step_log_other_oldest(files: RunFiles) -> None:
    files.steps[1]["groups"][0]["oldest"] = "1.1"


def _step_log_other_staleness(files: RunFiles) -> None:
    files.steps[1]["groups"][0]["staleness"] = 0


def _step_log_other_maximum(files: RunFiles) -> None:
    files.steps[1]["max_staleness"] = 0


def _step_log_other_version(files: RunFiles) -> None:
    files.steps[1]["policy_version"] = 3


def _step_log_other_draw(files: RunFiles) -> None:
    files.steps[1]["draw_number"] = 3


def _step_written_twice(files: RunFiles) -> None:
    files.steps.append(copy.deepcopy(files.steps[1]))


def _stored_but_never_sent(files: RunFiles) -> None:
    files.log = files.log[:2]


def _sent_with_other_tokens(files: RunFiles) -> None:
    files.log[2]["num_tokens"] = 4


def _acknowledged_but_not_in_ledger(files: RunFiles) -> None:
    files.log += [sent(3), answered(3)]


def _unknown_record(files: RunFiles) -> None:
    files.ledger.insert(3, {"type": "Forged"})


def _record_without_fields(files: RunFiles) -> None:
    files.ledger.insert(3, {"type": "Claimed"})


def depth_set(depth: int, incarnation: int = 1) -> Json:
    return {"type": "DepthSet", "incarnation": incarnation, "depth": depth, "reason": "r"}


def _depth_out_of_bounds(files: RunFiles) -> None:
    files.ledger.append(depth_set(2))


def _fenced_incarnation_sets_the_depth(files: RunFiles) -> None:
    files.ledger.append(depth_set(1, incarnation=2))


LIES: list[tuple[Callable[[RunFiles], None], str]] = [
    (_double_train, "trained twice on the surviving lineage"),
    (_too_stale, "at staleness 2 > 1"),
    (_from_the_future, "at staleness -1: weights that did not exist yet"),
    (_step_log_negative, "staleness -16: a token of weights that did not exist yet was trained"),
    (_named_twice, "the run is named y-2, it was x-1"),
    (_sequence_repeats, "publish_sequence 1 after 1"),
    (_trained_unstored, "was never stored"),
    (_ticket_ends_twice, "must be claimed or stored, but it is attempt 1 and dropped"),
    (_ticket_reopened_after_its_end, "must be claimed or stored, but it is attempt 1 and dropped"),
    (_late_insert_of_a_fenced_attempt, "group 3, attempt 1 must be claimed, but it is attempt 2"),
    (_ack_of_other_groups, "did not train what draw 1 held"),
    (_off_lineage, "sampled off-lineage"),
    (_fenced_incarnation_acks, "is acked by incarnation 2"),
    (_unknown_weights_live, "weights 1.7 went live"),
    (_step_log_missing_a_step, "the trainer never wrote it"),
    (_step_log_other_groups, "the trainer trained [(3, 1)], the ledger says [(1, 1)]"),
    (_step_log_other_attempt, "the trainer trained [(1, 2)], the ledger says [(1, 1)]"),
    (_step_log_other_tokens, "has num_tokens 6, the ledger says 5"),
    (_step_log_wrong_sum, "num_tokens 6, its groups have 5"),
    (_step_log_other_oldest, "has oldest 1.1, the ledger says 1.0"),
    (_step_log_other_staleness, "has staleness 0, the ledger says 1"),
    (_step_log_other_maximum, "max_staleness 0, its groups have 1"),
    (_step_log_other_version, "has policy_version 3"),
    (_step_log_other_draw, "draw 3, the ledger says 2"),
    (_step_written_twice, "wrote step 1 twice"),
    (_stored_but_never_sent, "nobody sent it"),
    (_sent_with_other_tokens, "was sent with [4] tokens, the ledger says 5"),
    (_acknowledged_but_not_in_ledger, "the ledger does not have it"),
    (_unknown_record, "unknown record type 'Forged'"),
    (_depth_out_of_bounds, "depth 2 is not within 0 to 1"),
    (_fenced_incarnation_sets_the_depth, "depth 1 is set by a fenced incarnation"),
    (_record_without_fields, "Claimed record cannot be understood"),
]


@pytest.mark.parametrize(
    ("lie", "expected"), LIES, ids=lambda value: getattr(value, "__name__", "")
)
def test_each_lie_is_named(lie: Callable[[RunFiles], None], expected: str, tmp_path: Path) -> None:
    files = RunFiles()
    lie(files)

    report = audited(files, tmp_path)

    assert not report.ok
    assert any(expected in problem for problem in report.problems), report.problems
    assert "PROBLEM" in report.to_text()


def test_a_lie_shows_in_the_counts(tmp_path: Path) -> None:
    files = RunFiles()
    _double_train(files)

    assert audited(files, tmp_path).duplicates_trained == 1


@pytest.mark.parametrize("name", ["ledger.jsonl", "steps.jsonl"])
def test_missing_witness_is_named(name: str, tmp_path: Path) -> None:
    RunFiles().write(tmp_path)
    (tmp_path / name).unlink()

    assert any(name in problem for problem in audit(tmp_path).problems)


def test_missing_generator_logs_are_named(tmp_path: Path) -> None:
    RunFiles().write(tmp_path)
    (tmp_path / "logs/g0.groups.jsonl").unlink()

    assert any("holds no generator's log" in problem for problem in audit(tmp_path).problems)


def test_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    RunFiles().write(tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("{broken\n" + ledger.read_text())

    assert any("line 1 is no JSON" in problem for problem in audit(tmp_path).problems)


def test_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml is missing"):
        audit(tmp_path)


MASKING = CONFIG.replace("max_staleness: 1", "max_staleness: 0").replace(
    "pipeline_depth: 1", "pipeline_depth: 0, over_age: mask_tokens"
)


def masked_files() -> RunFiles:
    """Step 1 trains a group of which 2 of 5 tokens are of version 0, with S = 0."""
    files = RunFiles(MASKING)
    files.find("Stored", 1)["summary"]["weights_tokens"] = [[[1, 0], 2], [[1, 1], 3]]
    files.steps[1]["groups"][0] |= {"num_over_age": 2, "oldest": "1.1", "staleness": 0}
    files.steps[1]["max_staleness"] = 0
    return files


def test_masked_tokens_are_not_trained_tokens(tmp_path: Path) -> None:
    report = audited(masked_files(), tmp_path)

    assert report.problems == []
    assert report.tokens == {"stored": 10, "trained": 8, "over_age": 2}
    assert report.max_staleness_trained == 0


def test_a_trainer_that_masked_too_little_is_named(tmp_path: Path) -> None:
    files = masked_files()
    files.steps[1]["groups"][0]["num_over_age"] = 1

    (problem,) = audited(files, tmp_path).problems

    assert "has num_over_age 1, the ledger says 2" in problem


def test_a_group_with_nothing_but_masked_tokens_must_not_be_trained(tmp_path: Path) -> None:
    files = masked_files()
    files.find("Stored", 1)["summary"]["weights_tokens"] = [[[1, 0], 5]]

    problems = audited(files, tmp_path).problems

    assert any("at staleness 1 > 0" in problem for problem in problems)
