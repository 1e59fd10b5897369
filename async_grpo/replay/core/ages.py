"""When a group is too old for a step, from the versions of its tokens. Knows nothing of tickets."""

from async_grpo.config.staleness import OverAge
from async_grpo.replay.core.settings import CoreSettings
from async_grpo.replay_parts import GroupSummary
from async_grpo.types import WeightsName


def oldest_name(summary: GroupSummary) -> WeightsName:
    """Weights of the oldest token of an on-lineage group, so that versions compare."""
    return min((name for name, _ in summary.weights_tokens), key=lambda name: name.policy_version)


def newest_version(summary: GroupSummary) -> int:
    """policy_version of the newest token."""
    return max(name.policy_version for name, _ in summary.weights_tokens)


def why_stale(summary: GroupSummary, train_version: int, settings: CoreSettings) -> str:
    """Why a step from `train_version` must not use the group; empty if it may."""
    bound = settings.max_staleness
    if settings.over_age is OverAge.reject:
        staleness = train_version - oldest_name(summary).policy_version
        return f"staleness {staleness} > {bound}" if staleness > bound else ""
    total = sum(count for _, count in summary.weights_tokens)
    fresh = sum(
        count
        for name, count in summary.weights_tokens
        if train_version - name.policy_version <= bound
    )
    if fresh >= settings.min_fresh_fraction * total:
        return ""
    return f"{fresh} of {total} tokens are within {bound} steps"


def why_not_forced(summary: GroupSummary, policy_version: int, settings: CoreSettings) -> str:
    """Why a finished group would break `staleness.force`; empty if it does not.

    While groups are in flight no step is taken, so all tokens of all of them are of one version:
    the one that the next step starts from. Else an engine had missed an update, or the groups that
    a restart lost are being sampled anew while the step goes on.
    """
    versions = sorted({name.policy_version for name, _ in summary.weights_tokens})
    if not settings.forced or versions == [policy_version]:
        return ""
    return f"sampled by versions {versions}, staleness.force wants {policy_version} alone"
