"""What a ledger says, worked out from its JSON lines alone.

Deliberately shares no code with the replay core: it is the second opinion that `audit` needs.
Problems are collected, not raised, so that one lie does not hide the next.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from async_grpo.analysis.eval_reading import EvalReading

Json = dict[str, Any]
Key = tuple[int, int]
"""(group_id, attempt)"""


@dataclass(slots=True)
class Ticket:
    """One ticket as the ledger tells it."""

    attempt: int = 1
    place: str = "waiting"


@dataclass(slots=True)
class StoredGroup:
    """What the ledger says of a stored attempt."""

    num_tokens: int
    weights: dict[tuple[int, int], int]
    """(incarnation, policy_version) -> trainable tokens"""

    def oldest(self, not_before: float) -> tuple[int, int]:
        """The name with the smallest policy_version >= `not_before`; (0, 0): there is none."""
        names = [name for name in self.weights if name[1] >= not_before]
        return min(names, key=lambda name: (name[1], name[0]), default=(0, 0))

    def num_before(self, version: float) -> int:
        """Trainable tokens of versions before `version`."""
        return sum(count for name, count in self.weights.items() if name[1] < version)


@dataclass(slots=True)
class Step:
    """One acked train step."""

    incarnation: int
    step: int
    draw_number: int
    groups: list[Key]


@dataclass
class LedgerReading:
    """State after the records read so far, and everything that was wrong."""

    groups_per_step: int
    max_staleness: int
    masks_over_age: bool = False
    """`staleness.over_age: mask_tokens`: a trained group may hold older tokens, untrained"""
    tickets: dict[int, Ticket] = field(default_factory=dict)
    stored: dict[Key, StoredGroup] = field(default_factory=dict)
    """of every attempt that was ever stored"""
    draws: dict[int, tuple[int, list[Key]]] = field(default_factory=dict)
    """draw_number -> (train_version, groups)"""
    steps: list[Step] = field(default_factory=list)
    """surviving, by step"""
    voided: list[Step] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    """version that incarnation 1, 2, ... started from"""
    settled: int = 0
    """steps before this one can no longer be undone"""
    dropped: Counter[str] = field(default_factory=Counter)
    reissued: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    evals: EvalReading = field(default_factory=EvalReading)
    publish_sequence: int = 0
    run_token: str = ""
    num_duplicates: int = 0
    problems: list[str] = field(default_factory=list)
    _trained: set[int] = field(default_factory=set)
    """groups of surviving steps"""
    _line: int = 0

    def read(self, line: int, record: Json) -> None:
        """Take in the record of one line."""
        self._line = line
        reader = _READERS.get(record.get("type", ""))
        if reader is None:
            self._problem(f"unknown record type {record.get('type')!r}")
            return
        try:
            reader(self, record)
        except (KeyError, TypeError, ValueError) as error:
            kind = type(error).__name__
            self._problem(f"{record['type']} record cannot be understood ({kind}: {error})")

    def _problem(self, text: str) -> None:
        self.problems.append(f"ledger, line {self._line}: {text}")

    def _ticket(self, group_id: int, attempt: int, *places: str) -> Ticket:
        """The ticket that a record is about, which must be at that attempt and place."""
        ticket = self.tickets.setdefault(group_id, Ticket(attempt, "unknown"))
        if (ticket.attempt, ticket.place in places) != (attempt, True):
            self._problem(
                f"group {group_id}, attempt {attempt} must be {' or '.join(places)}, but it is "
                f"attempt {ticket.attempt} and {ticket.place}"
            )
        return ticket

    def made(self, record: Json) -> None:
        """A new ticket."""
        group_id = record["group_id"]
        if group_id in self.tickets:
            self._problem(f"group {group_id} is made twice")
        self.tickets[group_id] = Ticket()

    def claimed(self, record: Json) -> None:
        """A ticket was handed out."""
        self._ticket(record["group_id"], record["attempt"], "waiting").place = "claimed"

    def store(self, record: Json) -> None:
        """A group was taken in."""
        summary = record["summary"]
        key = (summary["group_id"], summary["attempt"])
        self._ticket(*key, "claimed").place = "stored"
        weights = {(name[0], name[1]): count for name, count in summary["weights_tokens"]}
        self.stored[key] = StoredGroup(summary["num_tokens"], weights)
        self.tokens["stored"] += summary["num_tokens"]

    def drop(self, record: Json) -> None:
        """A ticket ended untrained."""
        key = (record["group_id"], record["attempt"])
        self._ticket(*key, "claimed", "stored").place = "dropped"
        self.dropped[record["reason"]] += 1

    def reissue(self, record: Json) -> None:
        """An attempt ended; its ticket goes on."""
        key = (record["group_id"], record["attempt"])
        self._reopen(self._ticket(*key, "claimed", "stored"), record["reason"])

    def _reopen(self, ticket: Ticket, reason: str) -> None:
        ticket.attempt += 1
        ticket.place = "waiting"
        self.reissued[reason] += 1

    def draw(self, record: Json) -> None:
        """Groups were leased."""
        keys = [(group["group_id"], group["attempt"]) for group in record["groups"]]
        for key in keys:
            self._ticket(*key, "stored").place = "leased"
        self.draws[record["draw_number"]] = (record["train_version"], keys)

    def release(self, record: Json) -> None:
        """Leased groups are stored again; their ack may still come."""
        for group_id, attempt in self.draws[record["draw_number"]][1]:
            self._ticket(group_id, attempt, "leased").place = "stored"

    def train(self, record: Json) -> None:
        """A step was acked."""
        step = Step(
            record["incarnation"],
            record["step"],
            record["draw_number"],
            [(group_id, attempt) for group_id, attempt in record["groups"]],
        )
        if step.step != len(self.steps):
            self._problem(f"step {step.step} is acked after {len(self.steps)} steps")
        if step.incarnation != len(self.restored):
            self._problem(f"step {step.step} is acked by incarnation {step.incarnation}")
        version, keys = self.draws.get(step.draw_number, (None, []))
        if (version, sorted(keys)) != (step.step, sorted(step.groups)):
            self._problem(f"step {step.step} did not train what draw {step.draw_number} held")
        if len(step.groups) != self.groups_per_step:
            self._problem(f"step {step.step} has {len(step.groups)} groups")
        self._check_groups(step)
        for group_id, attempt in step.groups:
            self._ticket(group_id, attempt, "leased", "stored").place = "trained"
        self.steps.append(step)

    def _check_groups(self, step: Step) -> None:
        ids = [group_id for group_id, _ in step.groups]
        twice = self._trained.intersection(ids) | {g for g, n in Counter(ids).items() if n > 1}
        self._trained.update(ids)
        self.num_duplicates += len(twice)
        for group_id in sorted(twice):
            self._problem(f"group {group_id} is trained twice on the surviving lineage")
        for key in step.groups:
            stored = self.stored.get(key)
            if stored is None:
                self._problem(f"step {step.step} trained {key}, which was never stored")
                continue
            self._count_trained(stored, step.step, 1)
            staleness = self.staleness(key, step.step)
            if staleness > self.max_staleness:
                self._problem(
                    f"step {step.step} trained {key} at staleness {staleness} > "
                    f"{self.max_staleness}"
                )
            newest = max((version for _, version in stored.weights), default=0)
            if newest > step.step:
                self._problem(
                    f"step {step.step} trained {key} at staleness {step.step - newest}: weights "
                    "that did not exist yet"
                )
            off = [name for name in stored.weights if not self._on_lineage(name)]
            if off:
                self._problem(f"step {step.step} trained {key}, sampled off-lineage by {off}")

    def not_before(self, step: int) -> float:
        """Tokens of earlier versions are masked in a step that started from version `step`."""
        return step - self.max_staleness if self.masks_over_age else -math.inf

    def _count_trained(self, stored: StoredGroup, step: int, sign: int) -> int:
        """Add (1) or take back (-1) the tokens of a trained group; returns their number."""
        masked = stored.num_before(self.not_before(step))
        self.tokens["trained"] += sign * (stored.num_tokens - masked)
        if masked:
            self.tokens["over_age"] += sign * masked
        return stored.num_tokens - masked

    def staleness(self, key: Key, step: int) -> int:
        """Of a group's oldest trained token in a step that started from version `step`."""
        return step - self.stored[key].oldest(self.not_before(step))[1]

    def highest_staleness(self) -> int:
        """Over all surviving steps."""
        ages = [
            self.staleness(key, step.step)
            for step in self.steps
            for key in step.groups
            if key in self.stored
        ]
        return max(ages, default=0)

    def _on_lineage(self, name: tuple[int, int]) -> bool:
        incarnation, version = name
        later = self.restored[incarnation:]
        return 1 <= incarnation <= len(self.restored) and version <= min(later, default=version)

    def settle(self, record: Json) -> None:
        """Earlier steps are final: no checkpoint that could undo them is kept."""
        version = record["policy_version"]
        if not self.settled < version <= len(self.steps):
            self._problem(
                f"steps before {version} are settled after {self.settled}, with "
                f"{len(self.steps)} steps acked"
            )
        self.settled = max(version, self.settled)

    def start_trainer(self, record: Json) -> None:
        """A trainer took over: leases end, later steps are void."""
        version = record["restored_version"]
        if record["incarnation"] != len(self.restored) + 1:
            self._problem(f"incarnation {record['incarnation']} after {len(self.restored)}")
        if version > len(self.steps):
            self._problem(f"a trainer restored {version}, only {len(self.steps)} steps are acked")
        if version < self.settled:
            self._problem(f"a trainer restored {version}, steps before {self.settled} are final")
        incarnation = record.get("restored_incarnation", 0)
        if version and not self._on_lineage((incarnation, version)):
            self._problem(f"a trainer restored {incarnation}.{version}, which was undone")
        self.evals.trainer_started()
        for ticket in self.tickets.values():
            if ticket.place == "leased":
                ticket.place = "stored"
        self.draws.clear()
        for step in self.steps[version:]:
            self._trained.difference_update(group_id for group_id, _ in step.groups)
            for group_id, attempt in step.groups:
                self._reopen(self._ticket(group_id, attempt, "trained"), "rolled_back")
                stored = self.stored[group_id, attempt]
                self.tokens["rolled_back"] += self._count_trained(stored, step.step, -1)
        self.voided += self.steps[version:]
        del self.steps[version:]
        self.restored.append(version)

    def announce(self, record: Json) -> None:
        """A publish began."""
        sequence = record["publish_sequence"]
        if sequence <= self.publish_sequence:
            self._problem(f"publish_sequence {sequence} after {self.publish_sequence}")
        self.publish_sequence = max(sequence, self.publish_sequence)

    def go_live(self, record: Json) -> None:
        """A publish is live."""
        incarnation, version = record["weights"]
        if incarnation != len(self.restored) or version > len(self.steps):
            self._problem(f"weights {incarnation}.{version} went live, which nobody trained")

    def evaluation(self, record: Json) -> None:
        """An eval ticket or round."""
        if problem := _EVAL_READERS[record["type"]](self.evals, record):
            self._problem(problem)

    def set_depth(self, record: Json) -> None:
        """The trainer changed how far generators may run ahead."""
        if record["incarnation"] != len(self.restored):
            self._problem(f"depth {record['depth']} is set by a fenced incarnation")
        if not 0 <= record["depth"] <= self.max_staleness:
            self._problem(f"depth {record['depth']} is not within 0 to {self.max_staleness}")

    def name_run(self, record: Json) -> None:
        """The token of the run; it never changes."""
        if self.run_token:
            self._problem(f"the run is named {record['token']}, it was {self.run_token}")
        self.run_token = record["token"]

    def ignore(self, record: Json) -> None:
        """A record that the accounting does not depend on."""

    def check_end(self) -> None:
        """The accounting equations over everything read."""
        attempts = sum(ticket.attempt for ticket in self.tickets.values())
        num_reissued = sum(self.reissued.values())
        if attempts != len(self.tickets) + num_reissued:
            self.problems.append(
                f"ledger: {attempts} attempts != {len(self.tickets)} tickets + {num_reissued} "
                "reissued"
            )
        places = Counter(ticket.place for ticket in self.tickets.values())
        num_trained = sum(len(step.groups) for step in self.steps)
        if places["trained"] != num_trained:
            self.problems.append(
                f"ledger: {places['trained']} tickets are trained, the steps have {num_trained}"
            )
        if places["dropped"] != sum(self.dropped.values()):
            self.problems.append(
                f"ledger: {places['dropped']} tickets are dropped, "
                f"{sum(self.dropped.values())} were counted"
            )


_EVAL_READERS: dict[str, Callable[[EvalReading, Json], str]] = {
    "EvalOpened": EvalReading.opened,
    "EvalClaimed": EvalReading.claimed,
    "EvalEnded": EvalReading.ended,
    "EvalReissued": EvalReading.reissued,
}
_READERS: dict[str, Callable[[LedgerReading, Json], None]] = {
    "RunNamed": LedgerReading.name_run,
    "DatasetAgreed": LedgerReading.ignore,
    "Made": LedgerReading.made,
    "Claimed": LedgerReading.claimed,
    "Stored": LedgerReading.store,
    "Dropped": LedgerReading.drop,
    "Reissued": LedgerReading.reissue,
    "Drawn": LedgerReading.draw,
    "Released": LedgerReading.release,
    "Trained": LedgerReading.train,
    "Settled": LedgerReading.settle,
    "DepthSet": LedgerReading.set_depth,
    "TrainerStarted": LedgerReading.start_trainer,
    "Announced": LedgerReading.announce,
    "WentLive": LedgerReading.go_live,
    "Finished": LedgerReading.ignore,
    **dict.fromkeys(_EVAL_READERS, LedgerReading.evaluation),
}
