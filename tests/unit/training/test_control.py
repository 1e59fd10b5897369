"""What alarms and controller change: depth, learning rate, whether to go on; and a restart."""

import math
from pathlib import Path

import msgspec
import pytest

from async_grpo.config.load import load_config
from async_grpo.metrics.registry import checked
from async_grpo.training.control import Control, ControlState, DepthChange

BAD = {"ess/raw": 0.1}
GOOD = {"ess/raw": 0.9}


@pytest.fixture
def make(tmp_path: Path):
    """(overrides) -> a control at the configured depth, or at another."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "run: {output_dir: out, num_train_steps: 99}\npolicy: {model: m}\ntask: {name: reverse}\n"
        "staleness: {max_staleness: 8, pipeline_depth: 3}\nalarms: {patience: 2}\n"
    )

    def make(*overrides: str, depth: int = 3) -> Control:
        return Control(load_config(path, overrides), depth, noise=0.0)

    return make


def play(control: Control, *steps: dict[str, float]) -> list[DepthChange | None]:
    changes = []
    for values in steps:
        metrics, change = control.step(values, {})
        assert checked(metrics)["pacing/pipeline_depth"] == control.depth
        changes.append(change)
    return changes


def test_a_warning_changes_nothing(make, caplog):
    control = make()
    assert play(control, *[BAD] * 5) == [None] * 5
    assert [record.message[:40] for record in caplog.records] == [
        "ALARM ess: ess/raw 0.1 < 0.3 for 2 steps"
    ]
    assert (control.depth, control.lr_scale, control.stop_reason) == (3, 1.0, "")
    assert control.step(BAD, {})[0]["alarm/active"] == 1


def test_stop_says_why(make):
    control = make("alarms.ess_action=stop")
    play(control, BAD)
    assert not control.stop_reason
    play(control, BAD, GOOD)
    assert "ALARM ess: ess/raw 0.1 < 0.3 for 2 steps in a row" in control.stop_reason
    assert control.stop_reason.endswith("(alarms.ess_action=stop)")


def test_the_learning_rate_is_scaled_while_any_such_alarm_lasts(make):
    control = make("alarms.ess_action=scale_lr", "alarms.k3_action=scale_lr", "alarms.lr_factor=.1")
    both = BAD | {"kl/behavior_k3": 1.0}
    play(control, both)
    assert control.lr_scale == 1.0
    play(control, both)
    assert control.lr_scale == 0.1  # once, for two alarms
    play(control, *[GOOD | {"kl/behavior_k3": 1.0}] * 2)
    assert control.lr_scale == 0.1
    play(control, *[GOOD | {"kl/behavior_k3": 0.0}] * 2)
    assert control.lr_scale == 1.0


def test_shrinking_goes_on_while_it_lasts_but_not_faster_than_it_can_show(make, caplog):
    control = make("alarms.ess_action=shrink_depth", "weights.publish_every=2")
    changes = play(control, *[BAD] * 30)
    moved = {step: change.depth for step, change in enumerate(changes) if change}
    assert list(moved.values()) == [2, 1]  # publish_every - 1 is the floor
    first, second = moved
    assert (first, second - first) == (1, 6)  # its depth + 1 + patience steps later
    assert changes[1] == DepthChange(2, "alarm ess")
    assert play(control, *[GOOD] * 30) == [None] * 30  # nothing raises it again
    assert play(control, *[BAD] * 9) == [None] * 9
    assert "pipeline_depth is 1, the smallest" in caplog.records[-1].message


def test_the_controller_moves_the_depth_and_stays_below_what_an_alarm_shrank_it_to(make):
    control = make("staleness.controller=ess", "alarms.ess_action=shrink_depth")
    assert control.wants_lags
    lags = {lag: (800, math.exp(-0.001 * lag)) for lag in (2, 3, 4)}
    seen = []
    for _ in range(200):
        metrics, change = control.step(GOOD, lags)
        checked(metrics)
        if change:
            seen.append(change.depth)
            assert metrics["pacing/decision"] == 1
            assert metrics["pacing/predicted_ess"] > 0.95
            assert "above the target 0.8" in change.reason
    assert seen == [4, 5, 6, 7, 8]
    for values in (BAD, BAD):
        control.step(values, lags)
    assert control.depth == 7
    for _ in range(300):
        control.step(GOOD, lags)
    assert control.depth == 7


def test_its_state_survives_a_checkpoint(make):
    overrides = ("staleness.controller=ess", "alarms.ess_action=shrink_depth")
    control = make(*overrides)
    lags = {3: (800, 0.99)}
    for values in (BAD, BAD, BAD):
        control.step(values, lags)
    kept = msgspec.json.decode(msgspec.json.encode(control.snapshot()), type=ControlState)
    again = make(*overrides, depth=control.depth)
    again.restore(kept)
    assert again.start() is None
    assert again.snapshot() == control.snapshot()
    assert again.snapshot().ceiling == 2
    for _ in range(40):
        assert again.step(GOOD, lags) == control.step(GOOD, lags)


def test_a_checkpoint_of_before_has_no_such_state(make):
    control = make("staleness.controller=ess")
    control.restore(msgspec.json.decode(b"{}", type=ControlState))
    assert control.depth == 3


def test_a_shrunk_depth_that_nothing_holds_any_more_is_undone(make):
    assert make(depth=3).start() is None
    assert make("alarms.ess_action=shrink_depth", depth=1).start() is None
    control = make(depth=1)
    assert control.start().depth == control.depth == 3
