"""The pipeline depth that holds a target effective sample size (ESS). Pure: numbers in and out.

Per staleness s, y(s) = -log ESS of raw token weights is averaged over the last steps, weighed by
tokens. A line a + b * s through these points predicts y at a depth not tried: a is what engine and
trainer disagree about fresh tokens, b what one step of staleness costs. If log-ratios drift like a
random walk, y is linear in s; if updates point one way, it is quadratic and the line is a secant
that errs on the bold side, which is why the depth moves by one at a time and is then measured.

What keeps it from oscillating: a band between the raising and the lowering condition, a pause
after each change until groups of the new depth are what is trained, and a wait before it tries
again what it has had to take back, twice as long each time. What keeps it from running away:
bounds, steps of one, and no decision from few data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

MEMORY_STEPS = 10
"""An observation weighs 1 - 1 / MEMORY_STEPS of what it did one step before."""
MIN_TOKENS = 500.0
"""Remembered tokens below which nothing is decided."""
MIN_LAG_TOKENS = 50.0
"""Remembered tokens below which a staleness is no point of the fit."""
BAND = 0.1
"""Deeper only if the prediction there is this much (of the allowed -log ESS) below the limit."""
DECIDE_EVERY = 5
"""Steps between decisions that change nothing."""
MAX_WAIT = 640
"""Longest wait, in steps, before a depth that was taken back is tried again."""


class LagRecord(msgspec.Struct, kw_only=True):
    """What is remembered of one staleness."""

    tokens: float = 0.0
    weighted_y: float = 0.0
    """sum of tokens * (-log ESS)"""


class ControllerState(msgspec.Struct, kw_only=True):
    """The controller's memory, for a checkpoint."""

    lags: dict[int, LagRecord] = {}
    pause: int = MEMORY_STEPS
    """steps until the next decision"""
    wait: int = 0
    """steps until deeper may be tried again"""
    next_wait: int = 20
    """the wait after the next retreat"""
    went_deeper: bool = False
    """whether the last change was to a larger depth"""


@dataclass(frozen=True, slots=True)
class Fit:
    """y(s) = intercept + slope * s."""

    intercept: float
    slope: float
    tokens: float

    def ess(self, staleness: float) -> float:
        """Predicted, as a fraction."""
        return math.exp(-max(self.intercept + self.slope * staleness, 0.0))


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, and why."""

    depth: int
    reason: str
    fit: Fit | None = None


class DepthController:
    """Moves a depth within bounds. One call per train step."""

    def __init__(self, target_ess: float) -> None:
        """`target_ess`: in (0, 1)."""
        self._limit = -math.log(target_ess)
        self._target = target_ess
        self.state = ControllerState()

    def step(
        self, depth: int, ess_by_lag: Mapping[int, tuple[int, float]], *, low: int, high: int
    ) -> Decision | None:
        """Take in one train step.

        Args:
            depth: in force now.
            ess_by_lag: staleness -> (tokens, ESS as a fraction) of the step.
            low: smallest depth.
            high: largest depth.

        Returns:
            A decision, maybe to keep the depth; None between decisions.
        """
        self._observe(ess_by_lag)
        state = self.state
        state.pause, state.wait = max(0, state.pause - 1), max(0, state.wait - 1)
        if state.pause:
            return None
        decision = self._decide(depth, low, high)
        if decision.depth != depth:
            self._changed(depth, decision.depth)
        else:
            state.pause = DECIDE_EVERY
        return decision

    def _observe(self, ess_by_lag: Mapping[int, tuple[int, float]]) -> None:
        lags = self.state.lags
        for record in lags.values():
            record.tokens *= 1 - 1 / MEMORY_STEPS
            record.weighted_y *= 1 - 1 / MEMORY_STEPS
        for lag, (tokens, ess) in ess_by_lag.items():
            if tokens and ess > 0:  # false for nan too
                record = lags.setdefault(lag, LagRecord())
                record.tokens += tokens
                record.weighted_y += tokens * -math.log(min(ess, 1.0))
        self.state.lags = {lag: record for lag, record in lags.items() if record.tokens >= 1}

    def _changed(self, before: int, after: int) -> None:
        """Wait until groups of the new depth are trained and the old ones are forgotten."""
        state = self.state
        deeper = after > before
        if not deeper and state.went_deeper:  # taken back: try again later and later
            state.wait, state.next_wait = state.next_wait, min(2 * state.next_wait, MAX_WAIT)
        state.went_deeper = deeper
        state.pause = max(before, after) + 1 + MEMORY_STEPS

    def fit(self) -> Fit | None:
        """The line through what is remembered; None: too few data."""
        points = [
            (lag, record.tokens, record.weighted_y / record.tokens)
            for lag, record in self.state.lags.items()
            if record.tokens >= MIN_LAG_TOKENS
        ]
        tokens = sum(n for _, n, _ in points)
        if tokens < MIN_TOKENS:
            return None
        mean_lag = sum(n * lag for lag, n, _ in points) / tokens
        mean_y = sum(n * y for _, n, y in points) / tokens
        spread = sum(n * (lag - mean_lag) ** 2 for lag, n, _ in points)
        if not spread:  # of one staleness: through the origin, the steepest line there is
            slope = mean_y / mean_lag if mean_lag else 0.0
            return Fit(0.0 if mean_lag else mean_y, slope, tokens)
        slope = sum(n * (lag - mean_lag) * (y - mean_y) for lag, n, y in points) / spread
        slope = max(slope, 0.0)  # staleness never helps; a falling line is noise
        return Fit(mean_y - slope * mean_lag, slope, tokens)

    def _decide(self, depth: int, low: int, high: int) -> Decision:
        fit = self.fit()
        if not low <= depth <= high:
            return Decision(min(max(depth, low), high), f"bounds are {low} to {high}", fit)
        if fit is None:
            return Decision(depth, "keeps it: too few tokens to fit", None)
        line = f"-log ESS = {fit.intercept:.3g} + {fit.slope:.3g} * staleness"
        here = f"ESS {fit.ess(depth):.3f} predicted at {depth}"
        if -math.log(fit.ess(depth)) > self._limit:
            if depth == low:
                reason = f"keeps it: {here} is below the target {self._target:g}, and {low} is the "
                return Decision(depth, f"{reason}smallest; {line}", fit)
            return Decision(depth - 1, f"{here} is below the target {self._target:g}; {line}", fit)
        if depth == high:
            return Decision(depth, f"keeps it: {here}, and {high} is the largest; {line}", fit)
        there = f"{fit.ess(depth + 1):.3f} at {depth + 1}"
        if -math.log(fit.ess(depth + 1)) > self._limit * (1 - BAND):
            reason = f"keeps it: {here}, but {there} is not clearly above the target "
            return Decision(depth, f"{reason}{self._target:g}; {line}", fit)
        if self.state.wait:
            reason = f"keeps it: {here} and {there}, but {depth + 1} was taken back; tries again "
            return Decision(depth, f"{reason}in {self.state.wait} steps", fit)
        reason = f"{here} and {there} are above the target {self._target:g}; {line}"
        return Decision(depth + 1, reason, fit)
