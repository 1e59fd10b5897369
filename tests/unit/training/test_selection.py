"""Ratios trained / generated."""

import numpy as np
import pytest

from async_grpo.metrics.registry import checked
from async_grpo.replay_parts import GeneratedStats
from async_grpo.training.selection import LEAST_STEPS, WINDOW_STEPS, SelectionWindow
from async_grpo.types import DropReason, RolloutGroup, Segment, WeightsName
from tests.fakes.tiny_policy import random_groups


def groups_of(length: int, reward: float) -> list[RolloutGroup]:
    groups = random_groups(2, 2)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.reward = reward
        (completion,) = rollout.sequences
        completion.token_ids = np.zeros(length, dtype=np.int32)
        completion.behavior_logprobs = np.full(length, -1.0, dtype=np.float32)
        completion.segments = [Segment(WeightsName(1, 0), length)]
    return groups


def generated(mean_length: int, mean_reward: float, **dropped) -> GeneratedStats:
    return GeneratedStats(
        num_groups=5, num_completions=10, num_tokens=10 * mean_length,
        reward_sum=10 * mean_reward, **dropped,
    )  # fmt: skip


def test_long_completions_that_are_lost_show_in_the_ratios():
    window = SelectionWindow()
    for _ in range(LEAST_STEPS - 1):
        assert window.step(groups_of(8, 0.5), generated(10, 0.4)) == {}
    values = checked(window.step(groups_of(8, 0.5), generated(10, 0.4)))
    assert values["selection/length_ratio"] == pytest.approx(0.8)
    assert values["selection/reward_ratio"] == pytest.approx(1.25)
    for _ in range(WINDOW_STEPS):
        values = window.step(groups_of(9, 0.5), generated(9, 0.5))
    assert values == {
        "selection/length_ratio": pytest.approx(1.0),
        "selection/reward_ratio": pytest.approx(1.0),
    }


def test_groups_without_a_signal_are_left_out():
    """Four of ten completions, all of 30 tokens and reward 0, were dropped on purpose."""
    window, reason = SelectionWindow(), DropReason.NO_SIGNAL
    without = generated(
        18, 0.3,
        dropped={reason: 2}, dropped_completions={reason: 4}, dropped_tokens={reason: 120},
        dropped_rewards={reason: 0.0},
    )  # fmt: skip
    for _ in range(LEAST_STEPS):
        values = window.step(groups_of(10, 0.5), without)
    assert values["selection/length_ratio"] == pytest.approx(1.0)
    assert values["selection/reward_ratio"] == pytest.approx(1.0)


def test_a_step_for_which_nothing_finished_or_was_rewarded_is_no_division_by_zero():
    window = SelectionWindow()
    for _ in range(LEAST_STEPS):
        assert window.step(groups_of(8, 0.0), GeneratedStats()) == {}
    values = window.step(groups_of(8, -1.0), generated(8, -1.0))
    assert "selection/reward_ratio" not in values
    assert "selection/length_ratio" in values
