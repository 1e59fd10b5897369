"""Counters of what became of tickets, attempts and tokens. Durable; changed by evolve only."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from async_grpo.replay.core.keeping import KeptByLength
from async_grpo.replay_parts import EndStats, GeneratedStats, GroupSummary
from async_grpo.types import DropReason, ReissueReason

_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)


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
        self.recent = replace(
            recent,
            num_groups=recent.num_groups + 1,
            num_completions=recent.num_completions + figures.num_completions,
            num_tokens=recent.num_tokens + figures.num_tokens,
            reward_sum=recent.reward_sum + figures.reward_sum,
        )

    def drop(self, reason: DropReason, figures: GroupSummary | EndStats) -> None:
        """A ticket ended untrained; `figures`: of its group, as far as it was finished."""
        self.dropped[reason] += 1
        recent = self.recent
        self.recent = replace(
            recent,
            dropped=_plus(recent.dropped, reason, 1),
            dropped_completions=_plus(recent.dropped_completions, reason, figures.num_completions),
            dropped_tokens=_plus(recent.dropped_tokens, reason, figures.num_tokens),
            dropped_rewards=_plus(recent.dropped_rewards, reason, figures.reward_sum),
        )

    def reissue(self, reason: ReissueReason, num_tokens: int) -> None:
        """An attempt ended with so many finished tokens; its ticket goes on."""
        self.reissued[reason] += 1
        if num_tokens:
            recent = self.recent
            tokens = _plus(recent.reissued_tokens, reason, num_tokens)
            self.recent = replace(recent, reissued_tokens=tokens)


def _plus(counts: Mapping[_Key, _Number], key: _Key, more: _Number) -> dict[_Key, _Number]:
    """`counts` with `more` of `key`; the old ones stay as they are, since records hold them."""
    result = dict(counts)
    result[key] = result[key] + more if key in result else more
    return result
