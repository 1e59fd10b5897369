"""How old sampled tokens are, in train steps. Starts without torch.

Versions are policy versions of one lineage: the replay server hands out nothing else.
"""

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
