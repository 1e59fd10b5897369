"""Whether what is trained is like what was generated: the bias of rejecting by age."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.replay_parts import GeneratedStats
from async_grpo.types import DropReason, RolloutGroup

WINDOW_STEPS = 20
LEAST_STEPS = 10
"""Fewer tell of the start of a run, when short completions are the first to come."""


@dataclass(frozen=True, slots=True)
class _Sums:
    completions: int
    tokens: int
    rewards: float


class SelectionWindow:
    """Sums over the last train steps.

    Groups without a signal are left out on both sides: they are dropped on purpose, at any age.
    """

    def __init__(self) -> None:
        self._trained: deque[_Sums] = deque(maxlen=WINDOW_STEPS)
        self._generated: deque[_Sums] = deque(maxlen=WINDOW_STEPS)

    def step(self, groups: Sequence[RolloutGroup], generated: GeneratedStats) -> dict[str, float]:
        """Ratios trained / generated of length and reward; none while they would mean nothing.

        Args:
            groups: of this step.
            generated: all that finished since the draw before.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._trained.append(
            _Sums(
                len(rollouts),
                sum(rollout.num_tokens for rollout in rollouts),
                sum(rollout.reward for rollout in rollouts),
            )
        )
        without = DropReason.NO_SIGNAL
        self._generated.append(
            _Sums(
                generated.num_completions - generated.dropped_completions.get(without, 0),
                generated.num_tokens - generated.dropped_tokens.get(without, 0),
                generated.reward_sum - generated.dropped_rewards.get(without, 0.0),
            )
        )
        trained, finished = _total(self._trained), _total(self._generated)
        if len(self._trained) < LEAST_STEPS or not finished.tokens:
            return {}
        values = {
            "selection/length_ratio": (trained.tokens / trained.completions)
            / (finished.tokens / finished.completions)
        }
        if finished.rewards > 0:  # a ratio of means that may be negative says nothing
            values["selection/reward_ratio"] = (trained.rewards / trained.completions) / (
                finished.rewards / finished.completions
            )
        return values


def _total(steps: deque[_Sums]) -> _Sums:
    return _Sums(
        sum(step.completions for step in steps),
        sum(step.tokens for step in steps),
        sum(step.rewards for step in steps),
    )
