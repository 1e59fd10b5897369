"""Collectives that never return, as NCCL's whose peer never comes: what they cost the trainer."""

import asyncio
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from async_grpo.config.weights import WeightsSection
from async_grpo.errors import WeightSyncError
from async_grpo.replay_parts import CellPhase
from async_grpo.training.feed import LoopThread
from async_grpo.types import WeightsName
from async_grpo.weights.publisher import WeightPublisher
from tests.fakes.fake_engine import probe_of
from tests.fakes.fake_trainer_replay import FakeTrainerReplay

PATIENCE_S = 60.0
"""Of the tests; nothing here should come near it."""


class Source:
    """Two buckets of one tensor each."""

    def __init__(self):
        self.tensors = {"a": torch.arange(6.0), "b": torch.ones(6)}

    def named_tensors(self):
        return iter(self.tensors.items())

    def probe(self):
        return probe_of([1, 2], [-1.0], 1e-3)


class Replay(FakeTrainerReplay):
    """Engines begin, and say that they have failed as soon as they are in `died`."""

    def __init__(self, *engines: str) -> None:
        super().__init__(engines=engines)
        self.died: set[str] = set()

    async def wait_cell(self, publish_sequence, cell_id, phase, *, timeout_s):
        reply = await super().wait_cell(publish_sequence, cell_id, phase, timeout_s=timeout_s)
        for engine_id in self.died & reply.phases.keys():
            if phase is not CellPhase.BEGUN:
                reply.phases[engine_id] = CellPhase.FAILED
                reply.details[engine_id] = "killed"
        return reply


class Group:
    """Our end of a group; `stuck_at` is the bucket whose broadcast never returns."""

    def __init__(self, *, stuck_at: int | None = None, abort_hangs: bool = False) -> None:
        self.closed = False
        self.sent: list[torch.Tensor] = []
        self.calls: list[str] = []
        self.entered, self.forever = threading.Event(), threading.Event()
        self.aborted = threading.Event()
        self._stuck_at, self._abort_hangs = stuck_at, abort_hangs

    def broadcast(self, payload, *, ready=None):
        assert ready is None, "nothing is copied by a card here"
        if len(self.sent) == self._stuck_at:
            self.entered.set()
            assert self.forever.wait(PATIENCE_S)
            raise WeightSyncError("update group", "1.0", "broadcast", "let go by the test")
        self.sent.append(payload.clone())

    def close(self):
        self.closed = True
        self.calls.append("close")

    def abort(self):
        self.closed = True
        self.calls.append("abort")
        self.aborted.set()
        if self._abort_hangs:
            assert self.forever.wait(PATIENCE_S)


class Groups:
    """`join_group`; hands out prepared groups in the order that engines have."""

    def __init__(self, *groups: Group | None) -> None:
        self.made = list(groups)
        self.late: Future[Group] = Future()
        self.joining = threading.Event()

    def __call__(self, *, group_name, **_):
        group = self.made[int(group_name.split("-")[3])]
        if group is None:
            self.joining.set()
            return self.late.result(PATIENCE_S)
        return group


@pytest.fixture
def loop():
    thread = LoopThread("test")
    yield thread
    thread.close()


@pytest.fixture
def let_go():
    """Groups whose stuck threads end with the test."""
    groups: list[Group] = []
    yield groups.extend
    for group in groups:
        group.forever.set()


def publisher_for(replay, loop, groups, *, timeout_s):
    return WeightPublisher(
        replay,
        loop.call,
        WeightsSection(bucket_bytes=24, timeout_s=timeout_s),
        run_directory=Path("unused"),
        join=groups,
    )


def test_a_broadcast_is_given_up_at_once_when_every_engine_of_its_cell_has_failed(loop, let_go):
    replay, stuck, fine = Replay("e0", "e1"), Group(stuck_at=1), Group()
    let_go([stuck])
    publisher = publisher_for(replay, loop, Groups(stuck, fine), timeout_s=PATIENCE_S)
    started = time.monotonic()
    publisher.publish(WeightsName(1, 0), Source())
    assert stuck.entered.wait(PATIENCE_S)
    replay.died = {"e0"}
    publisher.wait()
    assert time.monotonic() - started < PATIENCE_S / 4, "the deadline was waited for"
    result = publisher.last_result
    assert [failure.split(":")[0] for failure in result.failures] == ["e0"]
    assert "e0 is failed: killed" in result.failures[0]
    assert result.num_cells == 2
    assert stuck.calls == ["abort", "close"]
    assert fine.calls == []
    assert len(fine.sent) == 2
    publisher.close()


def test_a_broadcast_whose_engines_say_nothing_is_given_up_at_the_deadline(loop, let_go, caplog):
    replay, stuck = Replay("e0"), Group(stuck_at=0)
    let_go([stuck])
    publisher = publisher_for(replay, loop, Groups(stuck), timeout_s=0.2)
    publisher.publish(WeightsName(1, 0), Source())
    publisher.wait()
    assert (
        "e0: update to 1.0 failed in phase 'bucket 0': it did not end within 0.2 s "
        "(weights.timeout_s)" in caplog.text
    )
    assert stuck.calls == ["abort", "close"]
    publisher.close()


def test_weights_that_a_broadcast_left_behind_still_reads_are_not_overwritten(loop, let_go):
    replay, stuck = Replay("e0"), Group(stuck_at=0)
    let_go([stuck])
    publisher = publisher_for(replay, loop, Groups(stuck), timeout_s=0.2)
    publisher.publish(WeightsName(1, 0), Source())
    publisher.wait()
    first = publisher._snapshot
    before = [bucket.clone() for bucket in first.buckets]
    assert first.is_lent
    replay.engines = []
    other = Source()
    other.tensors["a"] += 1
    publisher.publish(WeightsName(1, 1), other)
    publisher.wait()
    assert all(map(torch.equal, first.buckets, before))
    places = [bucket.data_ptr() for bucket in publisher._snapshot.buckets]
    publisher.publish(WeightsName(1, 2), other)
    publisher.wait()
    assert [bucket.data_ptr() for bucket in publisher._snapshot.buckets] == places
    publisher.close()


def test_a_group_that_is_made_after_it_was_given_up_is_aborted(loop):
    replay, groups, late = Replay("e0"), Groups(None), Group()
    publisher = publisher_for(replay, loop, groups, timeout_s=0.2)
    publisher.publish(WeightsName(1, 0), Source())
    publisher.wait()
    assert (
        "e0: update to 1.0 failed in phase 'join': it did not end within 0.2 s"
        in publisher.last_result.failures[0]
    )
    assert ("abort", 1, 0) in replay.calls, "the engine still waits for bytes"
    groups.late.set_result(late)
    assert late.aborted.wait(PATIENCE_S)
    publisher.close()


def test_the_rendezvous_is_given_up_at_once_when_an_engine_has_failed(loop):
    replay, groups = Replay("e0"), Groups(None)
    publisher = publisher_for(replay, loop, groups, timeout_s=PATIENCE_S)
    started = time.monotonic()
    publisher.publish(WeightsName(1, 0), Source())
    assert groups.joining.wait(PATIENCE_S)
    replay.died = {"e0"}
    publisher.wait()
    assert time.monotonic() - started < PATIENCE_S / 4
    assert "'join': e0 is failed: killed" in publisher.last_result.failures[0]
    groups.late.set_result(Group())
    publisher.close()


def test_the_trainer_is_told_of_a_cell_that_nobody_can_end(loop, let_go):
    """Here its abort hangs too. `publish`, `wait` and `close` return all the same."""
    replay, stuck = Replay("e0"), Group(stuck_at=1, abort_hangs=True)
    let_go([stuck])
    publisher = publisher_for(replay, loop, Groups(stuck), timeout_s=0.2)
    publisher.publish(WeightsName(1, 0), Source())
    with pytest.raises(WeightSyncError, match=r"^e0: update to 1\.0 failed in phase 'bucket 1'"):
        publisher.wait()
    with pytest.raises(WeightSyncError, match="did not end within"):
        publisher.publish(WeightsName(1, 1), Source())
    publisher.close()


def test_a_trainer_that_stops_leaves_a_broadcast_behind(loop, let_go):
    replay, stuck = Replay("e0"), Group(stuck_at=0)
    let_go([stuck])
    asked = threading.Event()
    look = replay.wait_cell

    async def wait_cell(*args, timeout_s, **kwargs):
        if stuck.entered.is_set():
            asked.set()
            await asyncio.Event().wait()
        return await look(*args, timeout_s=timeout_s, **kwargs)

    replay.wait_cell = wait_cell
    publisher = publisher_for(replay, loop, Groups(stuck), timeout_s=PATIENCE_S)
    publisher.publish(WeightsName(1, 0), Source())
    assert asked.wait(PATIENCE_S)
    started = time.monotonic()
    loop.cancel_calls()  # as the trainer's end does
    publisher.close()
    assert time.monotonic() - started < PATIENCE_S / 4
    assert "abort" in stuck.calls
