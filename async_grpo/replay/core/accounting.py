"""Counters of what became of tickets, attempts and tokens. Durable; changed by evolve only."""

from collections import Counter
from dataclasses import dataclass, field

from async_grpo.replay.core.keeping import KeptByLength
from async_grpo.replay_parts import EndStats, GeneratedStats, GroupSummary
from async_grpo.types import DropReason, ReissueReason


@dataclass(slots=True)
class Accounting:
    """Totals of the run, and what was generated since the newest draw."""

    tickets: int = 0
    trained: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    reissued: Counter[ReissueReason] = field(default_factory=Counter)
    kept: KeptByLength = field(default_factory=KeptByLength)
    recent: GeneratedStats = field(default_factory=GeneratedStats)

    def finish_group(self, figures: GroupSummary | EndStats) -> None:
        """A generator finished a group."""
        recent = self.recent
        self.recent = GeneratedStats(
            num_groups=recent.num_groups + 1,
            num_completions=recent.num_completions + figures.num_completions,
            num_tokens=recent.num_tokens + figures.num_tokens,
            reward_sum=recent.reward_sum + figures.reward_sum,
            dropped=recent.dropped,
            dropped_tokens=recent.dropped_tokens,
        )

    def drop(self, reason: DropReason, num_tokens: int) -> None:
        """A ticket ended untrained."""
        self.dropped[reason] += 1
        recent = self.recent
        self.recent = GeneratedStats(
            num_groups=recent.num_groups,
            num_completions=recent.num_completions,
            num_tokens=recent.num_tokens,
            reward_sum=recent.reward_sum,
            dropped={**recent.dropped, reason: recent.dropped.get(reason, 0) + 1},
            dropped_tokens={
                **recent.dropped_tokens,
                reason: recent.dropped_tokens.get(reason, 0) + num_tokens,
            },
        )
