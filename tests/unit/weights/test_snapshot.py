import threading

import pytest
import torch

from async_grpo.errors import WeightSyncError
from async_grpo.types import WeightsName
from async_grpo.weights.flatten import dtype_name, empty_buckets
from async_grpo.weights.plan import TensorSpec, make_plan
from async_grpo.weights.snapshot import Snapshot
from tests.fakes.fake_collectives import CARD, FakeCuda, FakeEvent
from tests.fakes.fake_engine import probe_of

TENSORS = {"a": torch.arange(4.0), "b": torch.arange(3.0) + 10}
PROBE = probe_of([1, 2], [-1.0], 1e-3)


def make_snapshot(tensors=TENSORS, *, buckets=None, source=None):
    specs = [TensorSpec(name, dtype_name(t), tuple(t.shape)) for name, t in tensors.items()]
    plan = make_plan(specs, 16)
    buckets = buckets or empty_buckets(plan, torch.device("cpu"))
    return Snapshot(WeightsName(1, 2), plan, PROBE, {}, buckets, source=source)


def test_a_bucket_leaves_while_the_next_one_is_still_to_be_copied():
    snapshot = make_snapshot()
    first_left = threading.Event()

    class Gated(dict):
        def get(self, name):
            if name == "b":
                assert first_left.wait(10), "the first bucket waits for the second"
            return self[name]

    copying = threading.Thread(target=snapshot.fill, args=(Gated(TENSORS),))
    copying.start()
    buckets = snapshot.whole_buckets(10)
    assert next(buckets).view(torch.float32).tolist() == [0, 1, 2, 3]
    first_left.set()
    assert next(buckets).view(torch.float32).tolist() == [10, 11, 12]
    copying.join(10)


def test_whoever_waits_for_weights_that_cannot_be_copied_gets_an_error():
    snapshot = make_snapshot()
    with pytest.raises(ValueError, match="b is not the float32"):
        snapshot.fill({"a": TENSORS["a"], "b": torch.zeros(5)})
    buckets = snapshot.whole_buckets(10)
    next(buckets)
    with pytest.raises(WeightSyncError, match="b is not the float32"):
        next(buckets)


def test_the_wait_for_a_bucket_has_a_deadline():
    with pytest.raises(WeightSyncError, match=r"bucket 0 took over 0\.01 s"):
        next(make_snapshot().whole_buckets(0.01))


def test_copies_from_a_card_are_queued_and_only_their_events_are_waited_for(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    snapshot = make_snapshot(source=CARD)
    snapshot.fill(TENSORS)
    assert cuda.log == ["record on default"] * 2  # behind each bucket; nothing waits
    for index in range(2):
        payload, copied = snapshot.bucket(index, 10)
        assert payload is snapshot.buckets[index]
        assert isinstance(copied, FakeEvent)
    assert len(list(snapshot.whole_buckets(10))) == 2
    copied.happened = False
    buckets = snapshot.whole_buckets(0.01)
    next(buckets)
    with pytest.raises(WeightSyncError, match=r"bucket 1 took over 0\.01 s"):
        next(buckets)


def test_on_the_cpu_there_are_no_events():
    snapshot = make_snapshot()
    snapshot.fill(TENSORS)
    assert [snapshot.bucket(index, 10)[1] for index in range(2)] == [None, None]


def test_buckets_are_lent_until_the_last_reader_is_done():
    snapshot = make_snapshot()
    with snapshot.lent():
        with pytest.raises(RuntimeError, match="lost"), snapshot.lent():
            raise RuntimeError("lost")
        assert snapshot.is_lent
    assert not snapshot.is_lent
