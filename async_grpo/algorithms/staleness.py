"""How old sampled tokens are, in train steps. Starts without torch.

Versions are policy versions of one lineage: the replay server hands out nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from async_grpo.types import Segment

BUCKETS: tuple[tuple[str, int, int | None], ...] = (
    ("0", 0, 0),
    ("1", 1, 1),
    ("2", 2, 2),
    ("3-4", 3, 4),
    ("5-8", 5, 8),
    ("9+", 9, None),
)
"""(name, first, last) of the staleness ranges that statistics are split by."""


def is_fresh(train_version: int, oldest_version: int, max_staleness: int) -> bool:
    """Whether a group whose oldest token is of `oldest_version` may be trained."""
    return train_version - oldest_version <= max_staleness


def token_versions(segments: Sequence[Segment]) -> list[int]:
    """Policy version of each token; -1 where no policy sampled it or it is not trainable."""
    versions: list[int] = []
    for segment in segments:
        sampled = segment.weights is not None and segment.trainable
        version = segment.weights.policy_version if sampled and segment.weights else -1
        versions += [version] * segment.num_tokens
    return versions


@dataclass(frozen=True, slots=True)
class StalenessSplit:
    """Token-weighted staleness of some groups, in train steps."""

    num_tokens: int
    mean: float
    max: int
    in_flight: float
    """mean of (newest version of the token's group - the token's version): what passed while the
    group was still being sampled"""
    in_queue: float
    """mean of (train_version - newest version of the group): what passed after it was finished"""


def split(train_version: int, groups: Iterable[Sequence[int]]) -> StalenessSplit:
    """Staleness of all trained tokens, split at the moment each group was finished.

    Args:
        train_version: the version that the step starts from.
        groups: versions of the trained tokens of each group; negative ones are skipped.
    """
    num_tokens, total, largest, in_queue = 0, 0, 0, 0
    for versions in groups:
        sampled = [version for version in versions if version >= 0]
        if not sampled:
            continue
        num_tokens += len(sampled)
        total += len(sampled) * train_version - sum(sampled)
        largest = max(largest, train_version - min(sampled))
        in_queue += len(sampled) * (train_version - max(sampled))
    if not num_tokens:
        return StalenessSplit(0, 0.0, 0, 0.0, 0.0)
    return StalenessSplit(
        num_tokens=num_tokens,
        mean=total / num_tokens,
        max=largest,
        in_flight=(total - in_queue) / num_tokens,
        in_queue=in_queue / num_tokens,
    )


@dataclass(frozen=True, slots=True)
class SequenceStaleness:
    """Staleness of one sequence, in train steps; versions never fall along a sequence."""

    head: int
    """of its first trained token: the largest"""
    tail: int
    """of its last trained token"""
    version_span: int
    """versions that passed while it was sampled"""


def sequence_staleness(train_version: int, versions: Sequence[int]) -> SequenceStaleness:
    """Head, tail and span of one sequence.

    Args:
        train_version: the version that the step starts from.
        versions: of its tokens; negative ones (no policy sampled it, padding) are skipped.

    Raises:
        ValueError: no token has a version: a missing version must not read as fresh.
    """
    sampled = [version for version in versions if version >= 0]
    if not sampled:
        raise ValueError("no token of the sequence has a version")
    head, tail = train_version - sampled[0], train_version - sampled[-1]
    return SequenceStaleness(head, tail, head - tail)


def histogram(train_version: int, versions: Iterable[int]) -> dict[int, int]:
    """Staleness -> number of tokens; negative versions are skipped."""
    counts = Counter(train_version - version for version in versions if version >= 0)
    return dict(sorted(counts.items()))


def capacity(live_version: int, train_version: int, *, depth: int, groups_per_step: int) -> int:
    """Groups that may be claimed, stored or leased now: the window less what is trained ahead.

    Derived from state, never counted: after a resume it is the same formula. With everything
    trained live it is (depth + 1) * groups_per_step, at any version.
    """
    ahead = (train_version - live_version) * groups_per_step
    return max(0, (depth + 1) * groups_per_step - ahead)


def worst_case(*, max_staleness: int, publish_every: int, updates_per_step: int) -> dict[str, int]:
    """The largest staleness that can be trained, in the units that people ask for.

    Returns:
        steps: train steps, the bound itself; updates: optimizer updates; publishes: published
        versions between sampling and training, at most.
    """
    return {
        "steps": max_staleness,
        "updates": max_staleness * updates_per_step,
        "publishes": -(-max_staleness // publish_every),
    }
