"""The controller on scripted worlds: it finds the depth, holds it, and never runs away."""

import itertools
import math
import random
from collections.abc import Callable

import msgspec
import pytest

from async_grpo.training.depth_controller import ControllerState, DepthController, Fit

Law = Callable[[float], float]
"""staleness -> -log ESS"""


class World:
    """Trains at lags about the depth that was in force when the groups were admitted."""

    def __init__(
        self, law: Law, *, depth: int, low: int = 0, high: int = 8, target: float = 0.8,
        noise: float = 0.0, tokens: int = 800, seed: int = 0,
    ) -> None:  # fmt: skip
        self.law, self.low, self.high, self.noise, self.tokens = law, low, high, noise, tokens
        self.rng = random.Random(seed)
        self.controller = DepthController(target)
        self.depths = [depth]
        self.reasons: list[str] = []

    @property
    def depth(self) -> int:
        return self.depths[-1]

    def observed(self) -> dict[int, tuple[int, float]]:
        """A change of depth shows once the groups of before are trained."""
        effective = self.depths[max(0, len(self.depths) - 1 - self.depth)]
        found = {}
        for lag, share in ((effective - 1, 0.25), (effective, 0.5), (effective + 1, 0.25)):
            if 0 <= lag <= self.high and (effective or not lag):
                y = self.law(lag) * math.exp(self.noise * self.rng.gauss(0, 1))
                found[lag] = (int(share * self.tokens), math.exp(-y))
        return found

    def run(self, steps: int) -> "World":
        for _ in range(steps):
            decision = self.controller.step(
                self.depth, self.observed(), low=self.low, high=self.high
            )
            if decision is not None:
                self.reasons.append(decision.reason)
                assert abs(decision.depth - self.depth) <= 1
                assert self.low <= decision.depth <= self.high
            self.depths.append(self.depth if decision is None else decision.depth)
        return self

    def changes(self, first: int = 0) -> int:
        depths = self.depths[first:]
        return sum(a != b for a, b in itertools.pairwise(depths))


LIMIT = -math.log(0.8)


@pytest.mark.parametrize("start", [0, 2, 8])
@pytest.mark.parametrize(
    ("law", "deepest_good"),
    [
        (lambda s: 0.05 * s, 4),  # random walk: 0.2 at 4, 0.223 is the limit
        (lambda s: 0.02 + 0.01 * s * s, 4),  # ballistic drift, and some engine mismatch
        (lambda s: 0.001 * s, 8),  # nothing to hold back
        (lambda s: 0.3 * s, 0),  # only fresh tokens are good
    ],
)
def test_it_comes_to_the_deepest_depth_that_holds_the_target(law, deepest_good, start):
    world = World(law, depth=start).run(400)
    held = world.depths[200:]
    if deepest_good:
        assert set(held) <= {deepest_good - 1, deepest_good}  # the deepest that is clearly within
        assert world.changes(200) == 0
    else:  # at depth 0 nothing tells what staleness costs, but trying 1 now and then
        assert held.count(0) > 0.75 * len(held)
        assert world.changes(200) <= 6


@pytest.mark.parametrize("seed", range(5))
def test_noise_makes_it_neither_oscillate_nor_wander(seed):
    world = World(lambda s: 0.05 * s, depth=2, noise=0.3, seed=seed).run(3000)
    assert world.changes(200) <= 14  # tries again later and later
    assert set(world.depths[200:]) <= {3, 4, 5}
    assert sum(0.05 * depth <= LIMIT for depth in world.depths[200:]) > 0.95 * 2800


def test_what_was_taken_back_is_tried_again_later_and_later():
    """At depth 0 all looks well, at depth 1 it never is."""
    world = World(lambda s: 0.4 * (s > 0), depth=0, high=6).run(4000)
    ups = [
        step
        for step, (a, b) in enumerate(zip(world.depths, world.depths[1:], strict=False))
        if b > a
    ]
    gaps = [b - a for a, b in itertools.pairwise(ups)]
    assert 6 <= len(ups) <= 12
    assert gaps == sorted(gaps)
    assert gaps[-1] > 10 * gaps[0]
    assert set(world.depths) == {0, 1}
    assert any("was taken back" in reason for reason in world.reasons)


def test_a_policy_that_collapses_makes_it_retreat_to_the_floor_and_recover():
    world = World(lambda s: 0.01 * s, depth=4, low=1).run(100)
    deepest = world.depth
    assert deepest == 8
    world.law = lambda s: 3.0 + 0.1 * s
    world.run(300)
    assert world.depth == 1
    assert "below the target 0.8, and 1 is the smallest" in world.reasons[-1]
    world.law = lambda s: 0.01 * s
    world.run(400)
    assert world.depth >= 6


def test_few_data_decide_nothing():
    world = World(lambda s: 5.0, depth=3, tokens=40).run(100)
    assert world.changes() == 0
    assert set(world.reasons) == {"keeps it: too few tokens to fit"}
    controller = DepthController(0.8)
    for _ in range(50):
        controller.step(3, {}, low=0, high=8)
        controller.step(3, {2: (1000, math.nan), 3: (0, 0.5), 4: (1000, 0.0)}, low=0, high=8)
    assert controller.fit() is None


def test_one_bad_step_moves_nothing():
    world = World(lambda s: 0.02 * s, depth=8).run(200)
    before = world.depth
    world.law = lambda s: 6.0
    world.run(1)
    world.law = lambda s: 0.02 * s
    world.run(3)
    assert world.controller.fit().ess(before) > 0  # the outlier is in the memory
    world.run(60)
    assert min(world.depths[-60:]) >= before - 1


def test_fit_of_known_points():
    controller = DepthController(0.8)
    points = {lag: (1000, math.exp(-(0.1 + 0.05 * lag))) for lag in (0, 1, 3)}
    controller.step(2, points, low=0, high=4)
    fit = controller.fit()
    assert (fit.intercept, fit.slope) == (pytest.approx(0.1), pytest.approx(0.05))
    assert fit.ess(4) == pytest.approx(math.exp(-0.3))
    alone = DepthController(0.8)
    alone.step(2, {2: (1000, math.exp(-0.4))}, low=0, high=4)
    assert alone.fit() == Fit(0.0, pytest.approx(0.2), 1000)
    falling = DepthController(0.8)
    falling.step(2, {1: (500, math.exp(-0.3)), 2: (500, math.exp(-0.1))}, low=0, high=4)
    assert falling.fit() == Fit(pytest.approx(0.2), 0.0, 1000)


def test_a_depth_out_of_bounds_comes_back_at_once():
    controller = DepthController(0.8)
    controller.state.pause = 1
    decision = controller.step(6, {}, low=0, high=4)
    assert (decision.depth, decision.reason) == (4, "bounds are 0 to 4")


def test_its_memory_survives_json_and_decides_the_same():
    world = World(lambda s: 0.05 * s, depth=2, noise=0.2).run(37)
    kept = msgspec.json.encode(world.controller.state)
    again = World(lambda s: 0.05 * s, depth=2)
    again.controller.state = msgspec.json.decode(kept, type=ControllerState)
    again.depths, again.rng, again.noise = list(world.depths), world.rng, world.noise
    state = world.rng.getstate()
    expected = world.run(100).depths
    again.rng = random.Random()
    again.rng.setstate(state)
    assert again.run(100).depths == expected
