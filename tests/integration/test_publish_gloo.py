"""WeightPublisher to an engine in another process, over a real gloo group."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from async_grpo.config.weights import WeightsSection
from async_grpo.replay_parts import CellPhase
from async_grpo.training.feed import LoopThread
from async_grpo.types import WeightsName
from async_grpo.weights.publisher import WeightPublisher
from tests.fakes.fake_engine import probe_of
from tests.fakes.fake_trainer_replay import FakeTrainerReplay

ROOT = Path(__file__).parents[2]


class Source:
    def __init__(self):
        self.tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(5)}

    def named_tensors(self):
        return iter(self.tensors.items())

    def probe(self):
        return probe_of([1, 2], [-1.0], 1e-3)

    def sent(self):
        return [*self.tensors["a"].tolist(), *self.tensors["b"].flatten().tolist()]


class Receiver:
    """The other process; takes part in a cell as soon as it is opened."""

    def __init__(self, replay):
        self._replay = replay
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.gloo_receiver"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.fresh = []
        replay.on_open = self._opened

    def _opened(self, sequence, cell_id, rendezvous):
        self.fresh.append(rendezvous.fresh)
        sizes = [
            sum(4 * torch.Size(shape).numel() for shape in bucket.shapes)
            for bucket in self._replay.buckets
        ]
        order = {"rendezvous": msgspec.to_builtins(rendezvous), "sizes": sizes}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def received(self):
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def parts(tmp_path):
    loop = LoopThread("test")
    replay = FakeTrainerReplay(engines=["e0"])
    receiver = Receiver(replay)
    settings = WeightsSection(bucket_bytes=24, timeout_s=20.0)
    publisher = WeightPublisher(replay, loop.call, settings, run_directory=tmp_path)
    yield replay, receiver, publisher
    publisher.close()
    receiver.process.kill()
    receiver.process.communicate()
    loop.close()


def test_weights_arrive_and_the_group_is_kept(parts):
    replay, receiver, publisher = parts
    source = Source()
    for version in range(3):
        source.tensors["a"] += version
        expected = source.sent()
        publisher.publish(WeightsName(1, version), source)
        source.tensors["b"] -= 1.0  # the trainer steps on; what was published stays
        assert receiver.received() == expected
        publisher.wait()
        assert publisher.last_result.failures == []
    assert receiver.fresh == [True, False, False]
    assert len(replay.buckets) == 2
    replay.wishing = ["e0"]
    assert publisher.republish()
    assert receiver.received() == expected  # the snapshot, not the trainer's present weights


def test_a_cell_that_fails_to_commit_gets_a_fresh_group(parts):
    replay, receiver, publisher = parts
    source = Source()
    replay.fail_engines = {"e0": CellPhase.COMMITTED}
    publisher.publish(WeightsName(1, 0), source)
    publisher.wait()
    assert "e0 is failed" in publisher.last_result.failures[0]
    replay.fail_engines = {}
    assert receiver.received() == source.sent()
    publisher.publish(WeightsName(1, 1), source)
    assert receiver.received() == source.sent()
    publisher.wait()
    assert publisher.last_result.failures == []
    assert receiver.fresh == [True, True]


def test_each_engine_is_judged_by_its_own_word_not_by_the_collective(parts):
    replay, receiver, publisher = parts
    source = Source()
    publisher.publish(WeightsName(1, 0), source)
    receiver.received()
    publisher.wait()
    replay.on_open = None
    receiver.process.kill()
    receiver.process.wait()
    publisher.publish(WeightsName(1, 1), source)  # the broadcast raises; the engine says committed
    publisher.wait()
    assert publisher.last_result.failures == []
    opened = []
    replay.on_open = lambda *args: opened.append(args[2])
    replay.fail_engines = {"e0": CellPhase.BEGUN}
    publisher.publish(WeightsName(1, 2), source)
    publisher.wait()
    assert "e0 is failed" in publisher.last_result.failures[0]
    assert opened[0].fresh, "a group in which a broadcast failed is not used again"
    assert ("abort", 2, 0) not in replay.calls, "the engine may have received everything"
    assert ("abort", 3, 0) in replay.calls, "nothing was sent"
