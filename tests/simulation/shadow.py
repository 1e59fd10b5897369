"""A second opinion on the ledger: what the records mean, worked out without the core's code.

`read` refuses a record that breaks a guarantee; `compare` refuses counters that differ.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from async_grpo.config.staleness import OverAge
from async_grpo.replay.core.records import (
    Announced,
    Claimed,
    DepthSet,
    Drawn,
    Dropped,
    Made,
    Reissued,
    Released,
    Settled,
    Stored,
    Trained,
    TrainerStarted,
    WentLive,
)
from async_grpo.replay.core.settings import CoreSettings
from async_grpo.replay_api.peers import StatsReply
from async_grpo.types import ReissueReason


@dataclass
class Shadow:
    """Independent bookkeeping of one run."""

    settings: CoreSettings
    where: dict[int, str] = field(default_factory=dict)
    attempt: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """of stored groups: (incarnation, version, number) of each run of tokens"""
    size: dict[int, int] = field(default_factory=dict)
    draws: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    released: dict[int, tuple[int, list[tuple[int, int]]]] = field(default_factory=dict)
    steps: list[list[int]] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    settled: int = 0
    depth: int | None = None
    """as the trainer last set it"""
    disturbed: int = -1
    """steps acked when a restart last took stored groups, or a trainer last fell back"""
    live: int | None = None
    sequence: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    reissued: Counter[str] = field(default_factory=Counter)

    def read(self, records: Iterable[Any]) -> None:
        """Take records in, in order."""
        for record in records:
            reader = getattr(self, f"_on_{type(record).__name__.lower()}", None)
            if reader is not None:
                reader(record)

    def count(self, *places: str) -> int:
        """Tickets that are in one of these places."""
        return sum(place in places for place in self.where.values())

    def _expect(self, group_id: int, attempt: int, *places: str) -> None:
        assert self.attempt.get(group_id) == attempt, (
            f"group {group_id}: a record about attempt {attempt}, it is at {self.attempt[group_id]}"
        )
        assert self.where[group_id] in places, (
            f"group {group_id}: expected in {places}, it is {self.where[group_id]}"
        )

    def _on_made(self, record: Made) -> None:
        assert record.group_id == len(self.where), f"group {record.group_id} is out of order"
        assert not self.count("waiting"), "a new ticket although another waits"
        self.where[record.group_id], self.attempt[record.group_id] = "waiting", 1

    def _on_claimed(self, record: Claimed) -> None:
        self._expect(record.group_id, record.attempt, "waiting")
        waiting = [group for group, place in self.where.items() if place == "waiting"]
        assert record.group_id == min(waiting), "not the oldest waiting ticket"
        self.where[record.group_id] = "claimed"
        assert self.live is not None, "handed out before any weights were live"
        per_step = self.settings.groups_per_step
        under_way = self.count("claimed", "stored", "leased")
        not_live = per_step * (len(self.steps) - self.live)
        depth = self.settings.pipeline_depth if self.depth is None else self.depth
        window = (depth + 1) * per_step
        assert under_way + not_live <= window, (
            f"admission: {under_way} under way + {not_live} not live > {window}"
        )
        left = per_step * (self.settings.num_train_steps - len(self.steps))
        assert under_way <= left, f"admission: {under_way} under way, {left} left to train"

    def _on_stored(self, record: Stored) -> None:
        summary = record.summary
        self._expect(summary.group_id, summary.attempt, "claimed")
        self.where[summary.group_id] = "stored"
        self.tokens[summary.group_id] = [(*name, n) for name, n in summary.weights_tokens]
        self.size[summary.group_id] = summary.num_bytes
        held = [group for group, place in self.where.items() if place in ("stored", "leased")]
        used = sum(self.size[group] for group in held)
        assert used <= self.settings.max_bytes or len(held) == 1, f"{used} bytes are held"
        assert len(held) <= self.settings.max_groups, f"{len(held)} groups are held"

    def _on_dropped(self, record: Dropped) -> None:
        self._expect(record.group_id, record.attempt, "claimed", "stored")
        self.where[record.group_id] = "dropped"
        self.dropped[record.reason.value] += 1

    def _on_reissued(self, record: Reissued) -> None:
        self._expect(record.group_id, record.attempt, "claimed", "stored")
        self._reopen(record.group_id, record.reason.value)
        if record.reason is ReissueReason.LOST:
            self.disturbed = len(self.steps)

    def _reopen(self, group_id: int, reason: str) -> None:
        self.where[group_id] = "waiting"
        self.attempt[group_id] += 1
        self.reissued[reason] += 1

    def _check_ages(self, group_id: int, version: int) -> None:
        """A step from `version` may use the group: on-lineage, and no trained token is too old."""
        settings, runs = self.settings, self.tokens[group_id]
        for incarnation, policy_version, _ in runs:
            for restored in self.restored[incarnation:]:
                assert policy_version <= restored, f"group {group_id} is off-lineage"
        ages = {version - policy_version: 0 for _, policy_version, _ in runs}
        for _, policy_version, number in runs:
            ages[version - policy_version] += number
        if settings.over_age is OverAge.mask_tokens:
            fresh = sum(n for age, n in ages.items() if age <= settings.max_staleness)
            wanted = settings.min_fresh_fraction * sum(ages.values())
            assert fresh >= wanted, f"{fresh} tokens within S, {wanted} wanted"
            assert fresh > 0, "a group without a token to train"
        else:
            assert max(ages) <= settings.max_staleness, f"used at staleness {max(ages)}"
        if settings.forced:
            self._check_forced(version, list(ages))

    def _check_forced(self, version: int, ages: list[int]) -> None:
        """Exactly k, but for the first k steps after a start or a loss of stored groups."""
        k = self.settings.pipeline_depth
        assert len(ages) == 1, f"ages {ages} in one group"
        assert ages[0] <= k, f"staleness {ages[0]} is forced to be {k}"
        if self.disturbed < 0:
            assert ages[0] == min(version, k), f"step {version}: staleness {ages[0]}"
        elif version > self.disturbed + k:
            assert ages[0] == k, f"step {version}: staleness {ages[0]}, long after {self.disturbed}"

    def _on_drawn(self, record: Drawn) -> None:
        assert len(record.groups) == self.settings.groups_per_step, "not groups_per_step groups"
        assert record.incarnation == len(self.restored), "a draw of a fenced incarnation"
        for group in record.groups:
            self._expect(group.group_id, group.attempt, "stored")
            self._check_ages(group.group_id, record.train_version)
            self.where[group.group_id] = "leased"
        groups = [group.group_id for group in record.groups]
        self.draws[record.draw_number] = (record.train_version, groups)
        self.released.pop(record.draw_number, None)

    def _on_released(self, record: Released) -> None:
        version, groups = self.draws.pop(record.draw_number)
        self.released[record.draw_number] = (
            version,
            [(group, self.attempt[group]) for group in groups],
        )
        for group_id in groups:
            self.where[group_id] = "stored"

    def _on_trained(self, record: Trained) -> None:
        assert record.step == len(self.steps), f"step {record.step} after {len(self.steps)} steps"
        assert record.incarnation == len(self.restored), "an ack of a fenced incarnation"
        groups = [group for group, _ in record.groups]
        before = {group for step in self.steps for group in step}
        assert not before.intersection(groups), "a group is trained twice"
        place = "stored" if record.draw_number in self.released else "leased"
        expected = self.draws.pop(record.draw_number, None) or (
            self.released[record.draw_number][0],
            [group for group, _ in self.released[record.draw_number][1]],
        )
        assert expected == (record.step, groups), f"step {record.step} trained other groups"
        for group_id, attempt in record.groups:
            self._expect(group_id, attempt, place)
            self._check_ages(group_id, record.step)
            self.where[group_id] = "trained"
        self.steps.append(groups)

    def _on_trainerstarted(self, record: TrainerStarted) -> None:
        assert record.incarnation == len(self.restored) + 1, "incarnations grow by one"
        incarnation, version = record.restored_incarnation, record.restored_version
        assert self.settled <= version <= len(self.steps), f"{version} cannot be restored"
        assert incarnation <= len(self.restored), "a checkpoint of no trainer"
        assert bool(incarnation) == bool(version), "weights that are neither initial nor trained"
        for later in self.restored[incarnation:] if incarnation else []:
            assert version <= later, f"checkpoint {incarnation}.{version} was undone"
        for group_id, place in self.where.items():
            if place == "leased":
                self.where[group_id] = "stored"
        self.draws.clear()
        self.released.clear()
        for groups in self.steps[record.restored_version :]:
            for group_id in groups:
                self._reopen(group_id, "rolled_back")
        del self.steps[record.restored_version :]
        if self.restored:
            self.disturbed = len(self.steps)
        self.restored.append(record.restored_version)
        self.live = None

    def _on_depthset(self, record: DepthSet) -> None:
        assert record.incarnation == len(self.restored), "a word of a fenced incarnation"
        assert record.depth != self.depth, "the same depth again"
        assert self.settings.min_depth <= record.depth <= self.settings.deepest, "depth"
        self.depth = record.depth

    def _on_settled(self, record: Settled) -> None:
        assert record.incarnation == len(self.restored), "a word of a fenced incarnation"
        assert self.settled < record.policy_version <= len(self.steps), "settled without steps"
        self.settled = record.policy_version

    def _on_announced(self, record: Announced) -> None:
        assert record.publish_sequence > self.sequence, "publish_sequence did not grow"
        self.sequence = record.publish_sequence

    def _on_wentlive(self, record: WentLive) -> None:
        assert record.weights.incarnation == len(self.restored), "live weights of another life"
        assert record.weights.policy_version <= len(self.steps), "live before it was trained"
        self.live = record.weights.policy_version

    def compare(self, stats: StatsReply) -> None:
        """The core's own counters must say the same."""
        ours = {
            "tickets": len(self.where),
            "waiting": self.count("waiting"),
            "claimed": self.count("claimed"),
            "stored": self.count("stored"),
            "leased": self.count("leased"),
            "trained": self.count("trained"),
            "policy_version": len(self.steps),
            "publish_sequence": self.sequence,
            "pipeline_depth": self.settings.pipeline_depth if self.depth is None else self.depth,
            "dropped": dict(self.dropped),
            "reissued": dict(self.reissued),
        }
        theirs = {name: getattr(stats, name) for name in ours}
        theirs["dropped"] = {reason.value: n for reason, n in stats.dropped.items()}
        assert ours == theirs, f"counters differ: shadow {ours}, core {theirs}"
        num_open = self.count("waiting", "claimed", "stored", "leased")
        ended = self.count("trained") + sum(self.dropped.values())
        assert len(self.where) == ended + num_open
        assert sum(self.attempt.values()) == len(self.where) + sum(self.reissued.values())
