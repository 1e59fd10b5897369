"""The publisher against a scripted replay server (real broadcasts: test_publish_gloo.py)."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from async_grpo.config.weights import WeightsSection
from async_grpo.errors import PeerLost
from async_grpo.replay_parts import CellPhase
from async_grpo.training.feed import LoopThread
from async_grpo.types import WeightsName
from async_grpo.weights.publisher import WeightPublisher
from tests.fakes.fake_collectives import CARD, FakeCuda
from tests.fakes.fake_engine import probe_of
from tests.fakes.fake_trainer_replay import FakeTrainerReplay


class Source:
    def __init__(self):
        self.tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5)}

    def named_tensors(self):
        return iter(self.tensors.items())

    def probe(self):
        return probe_of([1, 2], [-1.0], 1e-3)


@pytest.fixture
def loop():
    thread = LoopThread("test")
    yield thread
    thread.close()


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def publisher_for(replay, loop, clock=None):
    settings = WeightsSection(bucket_bytes=24, timeout_s=20.0)
    return WeightPublisher(
        replay, loop.call, settings, run_directory=Path("unused"), clock=clock or Clock()
    )


def announced(replay):
    return [call[1:] for call in replay.calls if call[0] == "announce"]


def test_nobody_there_is_no_failure(loop):
    replay = FakeTrainerReplay()
    publisher = publisher_for(replay, loop)
    assert publisher.republish() is False  # nothing to send yet
    publisher.publish(WeightsName(1, 0), Source())
    publisher.wait()
    assert publisher.last_result.num_cells == 0
    assert publisher.last_result.failures == []
    assert announced(replay) == [(1, "1.0", False)]
    publisher.close()


def test_begin_that_fails_is_aborted_and_backed_off(loop):
    replay = FakeTrainerReplay(engines=["e0"])
    replay.fail_engines = {"e0": CellPhase.BEGUN}
    replay.wishing = ["e0"]
    clock = Clock()
    publisher = publisher_for(replay, loop, clock)
    publisher.publish(WeightsName(1, 0), Source())
    publisher.wait()
    assert "e0 is failed: told to" in publisher.last_result.failures[0]
    assert ("abort", 1, 0) in replay.calls
    assert publisher.republish() is False  # within the back-off
    clock.now += 0.6
    assert publisher.republish() is True
    publisher.wait()
    clock.now += 0.6
    assert publisher.republish() is False  # twice as long after the second failure
    clock.now += 0.6
    assert publisher.republish() is True
    publisher.wait()
    assert announced(replay)[1:] == [(2, "1.0", True), (3, "1.0", True)]
    publisher.close()


def test_an_error_of_the_replay_server_reaches_the_trainer(loop):
    class Gone(FakeTrainerReplay):
        async def announce(self, *args, **kwargs):
            raise PeerLost("the replay server is gone")

    publisher = publisher_for(Gone(), loop)
    publisher.publish(WeightsName(1, 0), Source())
    with pytest.raises(PeerLost):
        publisher.publish(WeightsName(1, 1), Source())
    publisher.close()


def test_a_publish_does_not_hold_up_the_trainer_and_sends_what_it_was_given(loop):
    gate = threading.Event()
    source = Source()

    class Slow(FakeTrainerReplay):
        async def announce(self, *args, **kwargs):
            await asyncio.to_thread(gate.wait, 10)
            return await super().announce(*args, **kwargs)

    replay = Slow()
    publisher = publisher_for(replay, loop)
    publisher.publish(WeightsName(1, 0), source)  # returns although nothing was announced
    assert announced(replay) == []
    assert publisher.republish() is False  # one is under way
    gate.set()
    publisher.wait()
    assert announced(replay) == [(1, "1.0", False)]
    publisher.close()


@pytest.mark.parametrize(("device", "pinned"), [(CARD, True), (torch.device("cpu"), False)])
def test_from_a_card_weights_for_gloo_go_through_pinned_memory(loop, monkeypatch, device, pinned):
    FakeCuda(monkeypatch)
    real, asked = torch.empty, []

    def empty(*args, pin_memory, **kwargs):
        asked.append((pin_memory, kwargs["device"].type))
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    settings = WeightsSection(bucket_bytes=24, timeout_s=20.0)
    publisher = WeightPublisher(
        FakeTrainerReplay(), loop.call, settings, run_directory=Path("unused"), device=device
    )
    publisher.publish(WeightsName(1, 0), Source())
    publisher.wait()
    assert asked == [(pinned, "cpu")] * 2
    publisher.close()
