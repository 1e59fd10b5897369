"""What a ledger says of evaluation, worked out from its JSON lines alone: a second opinion.

Eval tickets are in no figure over train tickets; here they have books of their own.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class EvalReading:
    """Eval tickets so far: group_id -> (attempt, place); problems are returned, not raised."""

    tickets: dict[int, tuple[int, str]] = field(default_factory=dict)
    num_rounds: int = 0
    num_tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    """of each evaluated attempt"""

    def opened(self, record: Json) -> str:
        """A round began."""
        first, count = record["first_group_id"], record["num_prompts"]
        ids = range(first, first - count, -1)
        if count < 1 or first != -(len(self.tickets) + 1):
            return f"eval round of {count} tickets from {first} on, after {len(self.tickets)}"
        still_open = self._count("waiting") + self._count("claimed")
        self.tickets |= dict.fromkeys(ids, (1, "waiting"))
        self.num_rounds += 1
        return f"an eval round began while {still_open} eval tickets were open" * bool(still_open)

    def claimed(self, record: Json) -> str:
        """A ticket was handed out."""
        return self._move(record, "waiting", "claimed")

    def ended(self, record: Json) -> str:
        """A ticket is over."""
        problem = self._move(record, "claimed", "failed" if record["failed"] else "evaluated")
        if not record["failed"]:
            key = (record["group_id"], record["attempt"])
            self.num_tokens[key] = record["stats"]["num_tokens"]
        return problem

    def reissued(self, record: Json) -> str:
        """An attempt was lost."""
        problem = self._move(record, "claimed", "waiting")
        self.tickets[record["group_id"]] = (record["attempt"] + 1, "waiting")
        return problem

    def trainer_started(self) -> None:
        """What was open failed."""
        for group_id, (attempt, place) in self.tickets.items():
            if place in ("waiting", "claimed"):
                self.tickets[group_id] = (attempt, "failed")

    def counts(self) -> dict[str, int]:
        """For the report."""
        return {
            "rounds": self.num_rounds,
            "tickets": len(self.tickets),
            "evaluated": self._count("evaluated"),
            "failed": self._count("failed"),
            "open": self._count("waiting") + self._count("claimed"),
        }

    def check_generators(self, lines: Iterable[Json]) -> list[str]:
        """Evaluated attempts that no generator wrote down, or with another number of tokens."""
        written: dict[tuple[Any, Any], set[Any]] = {}
        for line in lines:
            if line.get("event") == "evaluated":
                key = (line.get("group_id"), line.get("attempt"))
                written.setdefault(key, set()).add(line.get("num_tokens"))
        return [
            f"generators: eval group {key} is evaluated in the ledger with {count} tokens, "
            f"the generators' logs say {sorted(written.get(key, set()), key=str) or 'nothing'}"
            for key, count in self.num_tokens.items()
            if count not in written.get(key, set())
        ]

    def _count(self, wanted: str) -> int:
        return Counter(place for _, place in self.tickets.values())[wanted]

    def _move(self, record: Json, before: str, after: str) -> str:
        group_id, attempt = record["group_id"], record["attempt"]
        known = self.tickets.get(group_id)
        self.tickets[group_id] = (attempt, after)
        if known == (attempt, before):
            return ""
        return f"eval group {group_id}, attempt {attempt} must be {before}, but it is {known}"
