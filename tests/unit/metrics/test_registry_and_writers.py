import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from async_grpo.algorithms.staleness import BUCKETS
from async_grpo.metrics.registry import METRICS, checked
from async_grpo.metrics.writers import MetricsWriter


def test_undeclared_names_are_refused():
    with pytest.raises(KeyError, match="reward/men"):
        checked({"reward/men": 1.0})


def test_what_is_not_a_number_is_left_out():
    assert checked({"ess/raw": float("nan"), "entropy": 1.0}) == {"entropy": 1.0}


def test_every_metric_says_what_it_means():
    assert all(metric.meaning for metric in METRICS.values())
    for name, _, _ in BUCKETS:
        assert f"by_staleness/{name}/ess/raw" in METRICS
    assert not METRICS["reward/mean"].by_staleness


def test_one_line_per_step_is_there_at_once(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    with MetricsWriter(path, None) as writer:
        writer.write(0, {"step": 0, "reward/mean": 0.25})
        assert json.loads(path.read_text()) == {"step": 0, "reward/mean": 0.25}
        writer.write(1, {"step": 1, "reward/mean": 0.5})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_the_same(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as writer:
        writer.write(3, {"reward/mean": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (scalar,) = events.Scalars("reward/mean")
    assert (scalar.step, scalar.value) == (3, 0.25)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_an_evaluation_at_the_version_evaluated(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as writer:
        writer.write(7, {"reward/mean": 0.25, "eval/reward_mean": 0.5, "eval/policy_version": 5.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/reward_mean")] == [5]
    assert [event.step for event in events.Scalars("reward/mean")] == [7]
