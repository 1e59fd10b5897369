import logging

import pytest

from async_grpo.replay_parts import UpdateReport
from async_grpo.types import WeightsName
from async_grpo.weights.arrival import ArrivalWatch
from async_grpo.weights.publish_result import PublishResult


def check(watch, version, digest, checksums, tp_sizes=None):
    return watch.check(
        WeightsName(1, version), digest, checksums, tp_sizes or dict.fromkeys(checksums, 1)
    )


def test_a_checksum_that_follows_the_trainers_weights_is_quiet():
    watch = ArrivalWatch()
    assert check(watch, 0, "d0", {"e": "c0", "f": "c0"}) == []
    assert check(watch, 1, "d1", {"e": "c1", "f": "c1"}) == []
    assert check(watch, 2, "d1", {"e": "c1"}) == [], "the trainer's did not change either"
    assert check(watch, 3, "d0", {"e": "c0"}) == [], "back to what it was"


def test_weights_that_did_not_change_are_an_alarm(caplog):
    watch = ArrivalWatch()
    check(watch, 0, "d0", {"e": "c0", "f": "c0"})
    with caplog.at_level(logging.WARNING):
        (line,) = check(watch, 1, "d1", {"e": "c0"})
    assert "weights did not change: engine e has checksum c0 with 1.1 as with 1.0" in line
    assert line in caplog.text
    (line,) = check(watch, 2, "d2", {"f": "c0"})
    assert "with 1.2 as with 1.0" in line, "of an engine that missed one"


def test_engines_that_give_no_checksum_are_not_compared():
    watch = ArrivalWatch()
    assert check(watch, 0, "d0", {"e": "", "f": "c0"}) == []
    assert check(watch, 1, "d1", {"e": "", "f": "c1"}) == []


def test_engines_that_disagree_are_an_alarm():
    watch = ArrivalWatch()
    (line,) = check(watch, 0, "d", {"e": "c0", "f": "c1"})
    assert "engines disagree on 1.0" in line
    assert check(watch, 1, "e", {"g": "c2", "h": "c3"}, {"g": 1, "h": 2}) == [], "other sizes"


def test_metrics_of_an_announcement():
    reports = [
        UpdateReport(checksum="c", probe_gap=gap, seconds={"begin": 0.1, "receive": receive})
        for gap, receive in ((1e-6, 0.5), (3e-6, 0.7))
    ]
    values = PublishResult(WeightsName(1, 0), 2, [], 1.5, reports, ["one"]).metrics()
    assert values["sync/publish_s"] == 1.5
    assert values["sync/probe_gap"] == 3e-6
    assert values["sync/pause_s"] == pytest.approx(0.7)
    assert values["sync/pause_receive_s"] == pytest.approx(0.6)
    assert (values["sync/alarms"], values["sync/failed_cells"]) == (1, 0)
    failed = PublishResult(WeightsName(1, 0), 2, ["a cell"], 1.5).metrics()
    assert failed == {"sync/failed_cells": 1, "sync/alarms": 0}
