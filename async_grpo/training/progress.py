"""What the trainer says of itself: in heartbeats, and at the end."""

import logging
from collections import deque
from dataclasses import dataclass, field

from async_grpo.metrics.states import StateClock
from async_grpo.replay_parts import RoleStatus

logger = logging.getLogger(__name__)

_SUMMARY_STEPS = 10
_SHOWN = ("reward/mean", "staleness/mean", "staleness/max", "tokens/trained_per_s", "entropy")


@dataclass(slots=True)
class Progress:
    """Written by the training thread, read by the heartbeats."""

    incarnation: int = 0
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    first_rewards: list[float] = field(default_factory=list)
    last_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_SUMMARY_STEPS))
    token_staleness: float = 0.0
    max_staleness: float = 0.0
    num_tokens: float = 0.0
    training_since_s: float = 0.0
    """wall seconds of the trainer when the first groups came"""

    def add(self, values: dict[str, float]) -> None:
        """One more step."""
        self.step = int(values["policy_version"])
        self.metrics = {name: values[name] for name in _SHOWN}
        if len(self.first_rewards) < _SUMMARY_STEPS:
            self.first_rewards.append(values["reward/mean"])
        self.last_rewards.append(values["reward/mean"])
        self.num_tokens += values["tokens/trained"]
        self.token_staleness += values["staleness/mean"] * values["tokens/trained"]
        self.max_staleness = max(self.max_staleness, values["staleness/max"])

    def status(self, clock: StateClock) -> RoleStatus:
        """For a heartbeat."""
        return RoleStatus(
            state=clock.state,
            step=self.step,
            metrics=self.metrics,
            seconds=clock.seconds(),
        )

    def log_summary(self, clock: StateClock, max_staleness: int) -> None:
        """What this process' part of the run came to, in a few lines."""
        if not self.last_rewards:
            logger.info("no train step was left to do")
            return
        first, last = self.first_rewards, self.last_rewards
        logger.info(
            "reward: %.3f over the first %d steps, %.3f over the last %d",
            sum(first) / len(first), len(first), sum(last) / len(last), len(last),
        )  # fmt: skip
        logger.info(
            "staleness of trained tokens: mean %.2f, max %d (bound %d)",
            self.token_staleness / self.num_tokens,
            self.max_staleness,
            max_staleness,
        )
        seconds = clock.seconds()
        span = sum(seconds.values()) - self.training_since_s
        logger.info(
            "trainer: working %.0f %% of the %.1f s since the first groups came",
            100 * seconds.get("working", 0.0) / span,
            span,
        )
