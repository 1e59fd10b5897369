"""Alarms over the figures of train steps: when one is raised and when it is over.

A pure state machine: values in, events out; what an action does is `control`'s part. One noisy step
raises nothing, but for alarms that wait for no second one when it is grossly bad. A figure that
hovers about its threshold raises one alarm, not many.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec
from msgspec.structs import replace

from async_grpo.config.alarms import KINDS, AlarmAction, AlarmKind, AlarmsSection
from async_grpo.config.weights import NOISE_MARGIN

HYSTERESIS = 0.1
"""An alarm only ends this much (of the threshold) on the good side."""


class Change(Enum):
    """What happened to an alarm."""

    RAISED = "raised"
    LASTS = "lasts"
    """another `patience` steps in a row beyond the threshold"""
    OVER = "over"


@dataclass(frozen=True, slots=True)
class AlarmEvent:
    """One change of one alarm."""

    kind: AlarmKind
    change: Change
    action: AlarmAction
    value: float
    threshold: float
    num_steps: int
    """in a row"""

    def __str__(self) -> str:
        side = "<" if self.kind.is_floor else ">"
        figure = f"{self.kind.metric} {self.value:.4g}"
        if self.change is Change.OVER:
            return (
                f"alarm {self.kind.name} is over: {figure}, {self.num_steps} steps within "
                f"{self.threshold:g}"
            )
        steps = f"{self.num_steps} steps in a row" if self.num_steps > 1 else "a step"
        return (
            f"ALARM {self.kind.name}: {figure} {side} {self.threshold:.4g} for {steps}; "
            f"{self.kind.advice}"
        )


class AlarmState(msgspec.Struct, kw_only=True):
    """One alarm's memory."""

    active: bool = False
    bad_steps: int = 0
    """in a row beyond the threshold"""
    good_steps: int = 0
    """in a row clearly within it"""
    raised: int = 0
    """episodes so far"""


@dataclass(slots=True)
class _Watch:
    kind: AlarmKind
    threshold: float
    action: AlarmAction
    state: AlarmState = field(default_factory=AlarmState)

    def is_bad(self, value: float) -> bool:
        return value < self.threshold if self.kind.is_floor else value > self.threshold

    def is_bad_enough(self, value: float) -> bool:
        """That no other step is waited for; only of alarms with a ceiling."""
        factor = self.kind.at_once
        return factor is not None and value > factor * self.threshold

    def is_good(self, value: float) -> bool:
        margin = HYSTERESIS * self.threshold
        if self.kind.is_floor:
            return value >= self.threshold + margin
        return value <= self.threshold - margin


class Alarms:
    """All alarms of a run.

    Args:
        section: `alarms`.
        noise: mean |log-prob difference| by the trainer's own rounding, nats.
    """

    def __init__(self, section: AlarmsSection, *, noise: float = 0.0) -> None:
        self._patience = section.patience
        floors = {"lag0_gap": NOISE_MARGIN * noise}
        self._watches = [
            _Watch(kind, max(threshold, floors.get(kind.name, -math.inf)), section.action(kind))
            for kind in KINDS
            if (threshold := section.threshold(kind)) is not None
        ]

    def step(self, values: Mapping[str, float]) -> list[AlarmEvent]:
        """Take in the metrics of one train step; what is missing or not a number counts not."""
        events = []
        for watch in self._watches:
            value = values.get(watch.kind.metric, math.nan)
            if not math.isnan(value) and (change := self._next(watch, value)):
                steps = watch.state.good_steps if change is Change.OVER else watch.state.bad_steps
                events.append(
                    AlarmEvent(watch.kind, change, watch.action, value, watch.threshold, steps)
                )
        return events

    def _next(self, watch: _Watch, value: float) -> Change | None:
        state = watch.state
        state.bad_steps = state.bad_steps + 1 if watch.is_bad(value) else 0
        state.good_steps = state.good_steps + 1 if watch.is_good(value) else 0
        enough = state.bad_steps >= self._patience or watch.is_bad_enough(value)
        if not state.active and enough:
            state.active, state.raised = True, state.raised + 1
            return Change.RAISED
        if state.active and state.good_steps >= self._patience:
            state.active = False
            return Change.OVER
        if state.active and state.bad_steps and state.bad_steps % self._patience == 0:
            return Change.LASTS
        return None

    def active(self, action: AlarmAction | None = None) -> list[str]:
        """Names of the alarms that last, of all actions or of one."""
        return [
            watch.kind.name
            for watch in self._watches
            if watch.state.active and action in (None, watch.action)
        ]

    def metrics(self) -> dict[str, float]:
        """Of every alarm that is on: whether it lasts, and how often it was raised."""
        values: dict[str, float] = {}
        for watch in self._watches:
            values[f"alarm/{watch.kind.name}"] = int(watch.state.active)
            values[f"alarm/{watch.kind.name}_raised"] = watch.state.raised
        return values

    def snapshot(self) -> dict[str, AlarmState]:
        """For a checkpoint."""
        return {watch.kind.name: replace(watch.state) for watch in self._watches}

    def restore(self, states: Mapping[str, AlarmState]) -> Sequence[str]:
        """Go on from a checkpoint; returns the names of alarms that last.

        One that stops the run begins anew: whoever resumes has seen it, and gets `patience` steps.
        """
        for watch in self._watches:
            found = states.get(watch.kind.name)
            if found is not None:
                watch.state = replace(found)
                if watch.action is AlarmAction.stop:
                    watch.state = AlarmState(raised=found.raised)
        return self.active()
