"""Do an engine's log-probs of a probe agree with the trainer's? Pure.

Two correct computations of one model differ by rounding: by little on average, now and then by much
on one token. A tensor that is wrong moves the average. So the mean decides, and a single token only
where it is grossly off.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.replay_parts import ProbeIds

SKIPPED = 4
"""Positions at the start of a probe that are not compared: some models turn the first tokens into
attention sinks, with states so large that rounding them moves log-probs three times as far."""

_LEAST_TOKENS = 2
"""One log-prob to compare; an engine without room for it says so itself."""


@dataclass(frozen=True, slots=True)
class ProbeGap:
    """|log-prob difference| of one set of ids, in nats; infinite where an engine gave no number."""

    mean: float
    largest: float

    def within(self, tolerance: float, max_tolerance: float) -> bool:
        """Written so that a NaN fails."""
        return self.mean <= tolerance and self.largest <= max_tolerance


def probe_gap(found: Sequence[float | None], expected: Sequence[float]) -> ProbeGap:
    """The gap between an engine's log-probs and the trainer's.

    Args:
        found: by the engine; None where it gave no number.
        expected: by the trainer, as many, at least one.
    """
    pairs = list(zip(found, expected, strict=True))[min(SKIPPED, len(expected) // 4) :]
    gaps = [math.inf if mine is None else abs(mine - theirs) for mine, theirs in pairs]
    mean = math.fsum(gaps) / len(gaps)
    return ProbeGap(mean, mean if math.isnan(mean) else max(gaps))


def fitting(ids: ProbeIds, room: int | None) -> ProbeIds:
    """As much of a set as an engine has room for; the beginning of a probe is one, too.

    Args:
        ids: of the trainer's probe.
        room: longest prompt of the engine; None: not known.
    """
    if room is None or len(ids.token_ids) <= room:
        return ids
    room = max(room, _LEAST_TOKENS)
    return ProbeIds(token_ids=ids.token_ids[:room], logprobs=ids.logprobs[: room - 1])
