"""How many finished groups became stale, by the length of their completions. Durable.

Changed by evolve only. Rejection by age falls on long completions; see `weight`.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from async_grpo.replay_parts import EndStats, GroupSummary

_BINS_PER_OCTAVE = 2


def length_bin(figures: GroupSummary | EndStats) -> int:
    """Bin of a group's mean completion length."""
    mean = figures.num_tokens / max(figures.num_completions, 1)
    return math.floor(_BINS_PER_OCTAVE * math.log2(max(mean, 1.0)))


@dataclass(slots=True)
class KeptByLength:
    """Groups whose fate age decided, over the whole run, by length bin."""

    trained: Counter[int] = field(default_factory=Counter)
    stale: Counter[int] = field(default_factory=Counter)

    def weight(self, summary: GroupSummary, cap: float) -> float:
        """min(1 / P(trained | length), cap) >= 1: what a trained group of that length stands for.

        A length without data weighs 1, one of which nothing was trained weighs `cap`: a length that
        is hardly ever kept must not rule a batch.
        """
        position = length_bin(summary)
        trained, stale = self.trained[position], self.stale[position]
        if not stale:
            return 1.0
        return min((trained + stale) / trained, cap) if trained else cap
