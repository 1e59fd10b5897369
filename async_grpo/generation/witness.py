"""A generator's own record of every group it finished: one of the witnesses of `audit`.

Lines: {"event": "sent" | "answered" | "ended" | "evaluated", "group_id", "attempt", "num_tokens",
"outcome" or "reason", "oldest"}. "sent" is on its way to disk before the insert leaves, so a group
that the server knows and this file does not is a fault.
"""

from typing import Any

from async_grpo.metrics.json_lines import JsonLinesFile
from async_grpo.types import DropReason, InsertOutcome, RolloutGroup, Ticket


class WitnessLog(JsonLinesFile):
    """The file of one generator."""

    def sent(self, group: RolloutGroup) -> None:
        """The group is about to be inserted."""
        self._write("sent", group.group_id, group.attempt, group.num_tokens, group=group)

    def answered(self, group: RolloutGroup, outcome: InsertOutcome) -> None:
        """The insert was acknowledged."""
        self._write(
            "answered",
            group.group_id,
            group.attempt,
            group.num_tokens,
            group=group,
            outcome=outcome.value,
        )

    def ended(self, ticket: Ticket, reason: DropReason, num_tokens: int) -> None:
        """The attempt ended without an insert."""
        self._write("ended", ticket.group_id, ticket.attempt, num_tokens, reason=reason.value)

    def evaluated(self, group: RolloutGroup) -> None:
        """The figures of an eval group are about to be reported."""
        self._write("evaluated", group.group_id, group.attempt, group.num_tokens, group=group)

    def _write(
        self,
        event: str,
        group_id: int,
        attempt: int,
        num_tokens: int,
        *,
        group: RolloutGroup | None = None,
        **more: str,
    ) -> None:
        line: dict[str, Any] = {
            "event": event,
            "group_id": group_id,
            "attempt": attempt,
            "num_tokens": num_tokens,
            **more,
        }
        if group is not None:
            oldest = group.oldest_weights()
            line["oldest"] = "" if oldest is None else str(oldest)
        self.append(line)
