"""When an alarm is raised, when it is over, and what survives a restart."""

import pytest

from async_grpo.config.alarms import KINDS, AlarmAction, AlarmsSection
from async_grpo.metrics.registry import METRICS
from async_grpo.training.alarms import Alarms, Change


def alarms(**fields) -> Alarms:
    """Only the alarms whose threshold is named."""
    names = {kind.threshold_field for kind in KINDS}
    section = AlarmsSection(**(dict.fromkeys(names) | {"patience": 3} | fields))
    assert not list(section.problems("alarms"))
    return Alarms(section)


def play(watched: Alarms, metric: str, *series: float) -> list[tuple[int, Change]]:
    """(step, change) of every event."""
    return [
        (step, event.change)
        for step, value in enumerate(series)
        for event in watched.step({metric: value})
    ]


GOOD, BAD = 0.9, 0.1


def test_noisy_steps_raise_nothing():
    assert play(alarms(ess_min=0.3), "ess/raw", *[BAD, BAD, GOOD] * 20) == []


def test_one_episode_is_one_alarm_however_long():
    watched = alarms(ess_min=0.3)
    assert play(watched, "ess/raw", *[BAD] * 10, *[GOOD] * 4) == [
        (2, Change.RAISED), (5, Change.LASTS), (8, Change.LASTS), (12, Change.OVER),
    ]  # fmt: skip
    assert watched.metrics() == {"alarm/ess": 0, "alarm/ess_raised": 1}
    assert play(watched, "ess/raw", *[BAD] * 3) == [(2, Change.RAISED)]
    assert watched.metrics() == {"alarm/ess": 1, "alarm/ess_raised": 2}


def test_hovering_about_the_threshold_neither_ends_nor_repeats_it():
    watched = alarms(ess_min=0.3)
    events = play(watched, "ess/raw", *[BAD] * 3, *[0.31, 0.29] * 20)
    assert events == [(2, Change.RAISED)]
    assert watched.active() == ["ess"]
    assert play(watched, "ess/raw", *[0.33] * 3) == [(2, Change.OVER)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_threshold_itself_is_good_on_either_side(kind):
    metric, sign = kind.metric, -1 if kind.is_floor else 1
    watched = alarms(**{kind.threshold_field: 0.5, f"{kind.name}_action": AlarmAction.scale_lr})
    assert play(watched, metric, *[0.5] * 9) == []
    assert play(watched, metric, *[0.5 + sign * 0.01] * 3) == [(2, Change.RAISED)]
    assert watched.active(AlarmAction.scale_lr) == [kind.name]
    assert watched.active(AlarmAction.stop) == []
    assert METRICS[metric].meaning  # what it watches is logged
    assert set(watched.metrics()) <= set(METRICS)


def test_a_step_without_the_figure_does_not_count():
    watched = alarms(lag0_gap_max=0.05)
    assert play(watched, "logprob/lag0_gap", 0.1, float("nan"), 0.1) == []
    assert watched.step({}) == []
    assert [event.change for event in watched.step({"logprob/lag0_gap": 0.1})] == [Change.RAISED]


def test_an_engine_that_computes_another_function_is_told_in_the_first_step():
    """An asynchronous run measures lag0_gap in its first step and then seldom: patience never ran
    out, and a run of 8 steps with a gap of 0.18 nats ended without a word."""
    watched = alarms(lag0_gap_max=0.05, patience=5)
    (event,) = watched.step({"logprob/lag0_gap": 0.18})
    assert event.change is Change.RAISED
    assert str(event).startswith("ALARM lag0_gap: logprob/lag0_gap 0.18 > 0.05 for a step; engine")
    assert [watched.step({}) for _ in range(7)] == [[]] * 7
    assert watched.metrics()["alarm/lag0_gap"] == 1
    assert play(alarms(lag0_gap_max=0.05, patience=5), "logprob/lag0_gap", 0.149) == []


def test_a_policy_whose_own_rounding_is_large_raises_nothing_by_it():
    """A model of 135 M parameters in bfloat16: 0.04 nats against float32, 0.05 between kernels."""
    section = AlarmsSection(patience=3)
    assert play(Alarms(section, noise=0.04), "logprob/lag0_gap", *[0.06] * 9) == []
    assert play(Alarms(section, noise=0.04), "logprob/lag0_gap", *[0.2] * 3) == [(2, Change.RAISED)]
    assert play(Alarms(section), "logprob/lag0_gap", *[0.06] * 3) == [(2, Change.RAISED)]


def test_the_line_says_what_is_wrong_and_what_to_do():
    watched = alarms(ess_min=0.3)
    play(watched, "ess/raw", BAD, BAD)
    (event,) = watched.step({"ess/raw": 0.123456})
    assert str(event).startswith("ALARM ess: ess/raw 0.1235 < 0.3 for 3 steps in a row; ")
    assert "staleness.pipeline_depth" in str(event)
    play(watched, "ess/raw", GOOD, GOOD)
    (event,) = watched.step({"ess/raw": GOOD})
    assert str(event) == "alarm ess is over: ess/raw 0.9, 3 steps within 0.3"


def test_it_goes_on_where_it_was_but_one_that_stopped_the_run_begins_anew():
    watched = alarms(ess_min=0.3, k3_max=0.1, k3_action=AlarmAction.stop)
    for _ in range(4):
        watched.step({"ess/raw": BAD, "kl/behavior_k3": 1.0})
    kept = watched.snapshot()
    play(watched, "ess/raw", *[GOOD] * 3)
    assert kept["ess"].active  # a snapshot does not move
    again = alarms(ess_min=0.3, k3_max=0.1, k3_action=AlarmAction.stop)
    assert again.restore(kept) == ["ess"]
    assert again.metrics() == {
        "alarm/ess": 1, "alarm/ess_raised": 1, "alarm/k3": 0, "alarm/k3_raised": 1,
    }  # fmt: skip
    events = [again.step({"ess/raw": BAD, "kl/behavior_k3": 1.0}) for _ in range(3)]
    assert [event.kind.name for step in events for event in step] == ["ess", "k3"]


def test_the_defaults_watch_everything_and_only_warn():
    section = AlarmsSection()
    assert not list(section.problems("alarms"))
    assert section.uses(AlarmAction.warn) == [kind.name for kind in KINDS]
    assert len(KINDS) == 9
