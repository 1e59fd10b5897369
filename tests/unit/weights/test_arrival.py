import logging

import pytest

from async_grpo.config.policy import DType
from async_grpo.engine_api import Checksums, ServerInfo
from async_grpo.errors import WeightSyncError
from async_grpo.replay_parts import Probe, UpdateOrder, UpdateReport
from async_grpo.types import WeightsName
from async_grpo.weights.arrival import WHOLE, Arrivals, ArrivalWatch, disagreements, stores_exactly
from async_grpo.weights.publish_result import PublishResult

SGLANG = ServerInfo(version="0.5.23", dtype="bfloat16")
Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
QKV = "model.layers.0.self_attn.qkv_proj.weight"
NORM = "model.norm.weight"


def sums(total="t", **tensors):
    return Checksums(total=total, tensors=tensors)


def watching(*publishes):
    watch = ArrivalWatch()
    for number, (digests, found) in enumerate(publishes):
        assert watch.check(f"1.{number}", digests, found) == []
        watch.remember(f"1.{number}", digests, found)
    return watch


def test_tensors_that_follow_the_trainers_are_quiet():
    watch = watching(
        ({"a": 1, "b": 5}, sums(a="x", b="u")),
        ({"a": 2, "b": 5}, sums(a="y", b="u")),
        ({"a": 2, "b": 5}, sums(a="y", b="u")),
    )
    assert watch.check("1.3", {"a": 1, "b": 6}, sums(a="x", b="w")) == [], "a is back"


def test_one_tensor_that_was_left_out_is_found():
    watch = watching(({"a": 1, "b": 5}, sums(a="x", b="u")))
    (fault,) = watch.check("1.1", {"a": 2, "b": 6}, sums(a="y", b="u"))
    assert (fault.name, fault.did_not_arrive) == ("b", True)
    assert str(fault) == "b is as with weights 1.0, though the trainer's differs"


def test_one_tensor_that_changed_although_the_trainers_did_not_is_found():
    watch = watching(({"a": 1, "b": 5}, sums(a="x", b="u")))
    (fault,) = watch.check("1.1", {"a": 2, "b": 5}, sums(a="y", b="w"))
    assert (fault.name, fault.did_not_arrive) == ("b", False)


def test_a_tensor_still_at_the_initial_weights_is_found_after_many_publishes():
    """So is an engine that was restarted from them, and missed a tensor in its first update."""
    later = [({"a": n, "b": n}, sums(a=f"a{n}", b=f"b{n}")) for n in range(20)]
    watch = watching(*later)
    (fault,) = watch.check("1.20", {"a": 20, "b": 20}, sums(a="a20", b="b0"))
    assert (fault.name, fault.before) == ("b", "1.0")


def test_a_fused_tensor_is_made_of_several():
    watch = watching(({Q: 1, K: 2, V: 3, NORM: 4}, sums(**{QKV: "x", NORM: "n"})))
    changed = {Q: 1, K: 9, V: 3, NORM: 4}
    assert watch.check("1.1", changed, sums(**{QKV: "y", NORM: "n"})) == []
    (fault,) = watch.check("1.1", changed, sums(**{QKV: "x", NORM: "n"}))
    assert fault.name == QKV


def test_an_engine_without_names_is_compared_as_a_whole():
    watch = watching(({"a": 1, "b": 5}, sums("t0")))
    (fault,) = watch.check("1.1", {"a": 2, "b": 5}, sums("t0"))
    assert (fault.name, fault.did_not_arrive) == (WHOLE, True)


def test_a_coarse_engine_may_lose_small_steps_but_not_all():
    watch = watching(({"a": 1, "b": 5}, sums(a="x", b="u")))
    now = {"a": 2, "b": 6}
    assert watch.check("1.1", now, sums(a="y", b="u"), exact=False) == []
    assert len(watch.check("1.1", now, sums(a="x", b="u"), exact=False)) == 2
    (fault,) = watch.check("1.1", {"a": 1, "b": 6}, sums(a="y", b="w"), exact=False)
    assert fault.name == "a", "equal bytes are stored alike in any format"


@pytest.mark.parametrize(
    ("dtype", "sent", "tensors", "exactly"),
    [
        ("bfloat16", DType.bfloat16, {"a": "x"}, True),
        ("float32", DType.bfloat16, {"a": "x"}, True),
        ("bfloat16", DType.float32, {"a": "x"}, False),
        ("auto", DType.bfloat16, {"a": "x"}, False),
        ("bfloat16", DType.bfloat16, {"a": "x", "a_scale": "y"}, False),
    ],
)
def test_what_an_engine_stores_exactly(dtype, sent, tensors, exactly):
    info = ServerInfo(version="0.5.23", dtype=dtype)
    assert stores_exactly(info, sums(**tensors), sent) is exactly


def order(version, digests, incarnation=1):
    return UpdateOrder(
        publish_sequence=version + 1,
        weights=WeightsName(incarnation, version),
        cell_id=0,
        engine_ids=["e"],
        ranks=[1],
        buckets=[],
        probe=Probe(sets=[], tolerance=0.0, max_tolerance=0.0),
        digests=digests,
    )


def test_a_tensor_that_did_not_arrive_fails_the_update():
    arrivals = Arrivals(DType.bfloat16, fatal=True)
    assert arrivals.check("e", SGLANG, order(0, {"a": 1}), sums(a="x")) == []
    with pytest.raises(WeightSyncError, match=r"a is as with weights 1\.0") as caught:
        arrivals.check("e", SGLANG, order(1, {"a": 2}), sums(a="x"))
    assert (caught.value.peer, caught.value.phase) == ("e", "checksum")
    assert arrivals.check("f", SGLANG, order(1, {"a": 2}), sums(a="y")) == [], "f has it"


def test_an_engine_that_disagrees_with_another_of_its_kind_fails():
    arrivals = Arrivals(DType.bfloat16, fatal=True)
    arrivals.check("e", SGLANG, order(0, {"a": 1}), sums(a="x"))
    other_kind = ServerInfo(version="0.5.23", dtype="bfloat16", tp_size=2)
    assert arrivals.check("f", other_kind, order(0, {"a": 1}), sums(a="x x")) == []
    with pytest.raises(WeightSyncError, match=r"a is not as with weights 1\.0"):
        arrivals.check("g", SGLANG, order(0, {"a": 1}), sums(a="z"))


def test_a_fault_is_told_where_it_may_fail_nothing(caplog):
    arrivals = Arrivals(DType.bfloat16, fatal=False)
    arrivals.check("e", SGLANG, order(0, {"a": 1}), sums(a="x"))
    with caplog.at_level(logging.WARNING):
        (line,) = arrivals.check("e", SGLANG, order(1, {"a": 2}), sums(a="x"))
    assert line == "engine e with 1.1: a is as with weights 1.0, though the trainer's differs"
    assert line in caplog.text


def test_a_coarse_engine_in_which_nothing_changed_is_told_and_not_failed():
    arrivals = Arrivals(DType.float32, fatal=True)
    arrivals.check("e", SGLANG, order(0, {"a": 1}), sums(a="x"))
    assert len(arrivals.check("e", SGLANG, order(1, {"a": 2}), sums(a="x"))) == 1


def test_digests_of_another_trainers_life_are_not_compared():
    """Another process may hash on another device, so equal bytes may have other digests."""
    arrivals = Arrivals(DType.bfloat16, fatal=True)
    arrivals.check("e", SGLANG, order(0, {"a": 1}), sums(a="x"))
    assert arrivals.check("e", SGLANG, order(0, {"a": 7}, incarnation=2), sums(a="x")) == []


def test_engines_that_disagree_are_an_alarm():
    (line,) = disagreements({"e": "c0", "f": "c1"}, {"e": 1, "f": 1})
    assert line == "engines disagree: checksum c1 of f, c0 of e"
    assert disagreements({"g": "c2", "h": "c3"}, {"g": 1, "h": 2}) == [], "other sizes"
    assert disagreements({"g": "", "h": "c3"}, {"g": 1, "h": 1}) == [], "g gives none"


def test_metrics_of_an_announcement():
    reports = [
        UpdateReport(
            checksum="c",
            probe_gap=gap,
            probe_gap_max=4 * gap,
            seconds={"begin": 0.1, "receive": receive},
        )
        for gap, receive in ((1e-6, 0.5), (3e-6, 0.7))
    ]
    values = PublishResult(WeightsName(1, 0), 2, [], 1.5, reports, ["one"]).metrics()
    assert values["sync/publish_s"] == 1.5
    assert values["sync/probe_gap"] == 3e-6
    assert values["sync/probe_gap_max"] == 12e-6
    assert values["sync/pause_s"] == pytest.approx(0.7)
    assert values["sync/pause_receive_s"] == pytest.approx(0.6)
    assert (values["sync/alarms"], values["sync/failed_cells"]) == (1, 0)
    failed = PublishResult(WeightsName(1, 0), 2, ["a cell"], 1.5).metrics()
    assert failed == {"sync/failed_cells": 1, "sync/alarms": 0}
