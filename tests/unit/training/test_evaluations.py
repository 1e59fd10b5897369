import threading

import pytest

from async_grpo.errors import PeerLost
from async_grpo.replay_parts import EvalResult
from async_grpo.training.evaluations import EvaluationFeed, metrics_of
from async_grpo.training.feed import LoopThread
from async_grpo.types import WeightsName
from tests.fakes.fake_trainer_replay import FakeTrainerReplay


@pytest.fixture
def loop():
    thread = LoopThread("test")
    yield thread
    thread.close()


def result(version, incarnation=1, **changes):
    values = {
        "num_evaluated": 4, "num_failed": 1, "num_completions": 8, "num_tokens": 40,
        "reward_sum": 6.0,
        "weights_tokens": [
            (WeightsName(incarnation, version), 30), (WeightsName(incarnation, version + 1), 10),
        ],
    }  # fmt: skip
    return EvalResult(weights=WeightsName(incarnation, version), **(values | changes))


def test_metrics_of_a_result():
    assert metrics_of(result(10)) == {
        "eval/policy_version": 10.0, "eval/prompts": 4.0, "eval/failed_prompts": 1.0,
        "eval/reward_mean": 0.75, "eval/length_mean": 5.0, "eval/sampled_version_mean": 10.25,
    }  # fmt: skip


def test_a_round_that_failed_whole_has_no_means():
    failed = EvalResult(weights=WeightsName(1, 3), num_failed=5)

    assert metrics_of(failed) == {
        "eval/policy_version": 3.0, "eval/prompts": 0.0, "eval/failed_prompts": 5.0,
    }  # fmt: skip


def test_each_result_comes_once_in_order_and_only_of_this_incarnation(loop):
    replay = FakeTrainerReplay(incarnation=2)
    replay.results = [result(4, incarnation=1), result(4, incarnation=2)]
    feed = EvaluationFeed(replay, loop, 2)
    feed.start()
    first = next(feed.rest(6, timeout_s=10))
    loop.post(lambda: replay.results.append(result(6, incarnation=2)))
    others = [values["eval/policy_version"] for values in feed.rest(6, timeout_s=10)]
    feed.close()

    assert (first["eval/policy_version"], others) == (4.0, [6.0])
    assert feed.take() == {}


def test_take_does_not_wait(loop):
    feed = EvaluationFeed(FakeTrainerReplay(), loop, 1)
    feed.start()

    assert feed.take() == {}
    feed.close()


def test_waiting_for_the_last_one_has_a_deadline_that_is_told(loop, caplog):
    feed = EvaluationFeed(FakeTrainerReplay(), loop, 1)
    feed.start()

    assert list(feed.rest(5, timeout_s=0.05)) == []
    feed.close()
    assert "no evaluation of version 5 within eval.timeout_s" in caplog.text


def test_a_stop_ends_the_wait(loop):
    feed = EvaluationFeed(FakeTrainerReplay(), loop, 1)
    feed.start()
    found = []
    waiter = threading.Thread(target=lambda: found.extend(feed.rest(5, timeout_s=50)))
    waiter.start()
    feed.request_stop()
    waiter.join(10)
    feed.close()

    assert not waiter.is_alive()
    assert found == []


def test_a_lost_server_is_raised_where_results_are_taken(loop):
    class Gone(FakeTrainerReplay):
        async def evaluations(self, seen):
            raise PeerLost("gone")

    feed = EvaluationFeed(Gone(), loop, 1)
    feed.start()
    with pytest.raises(PeerLost, match="gone"):
        list(feed.rest(5, timeout_s=10))
    feed.close()
