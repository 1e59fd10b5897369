"""Tickets: which attempt is current and where it is. Durable; changed by `State.evolve` only.

Knows nothing of time, peers' health or versions.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from async_grpo.replay.core.records import Claimed, Dropped, Made, Reissued, Stored
from async_grpo.replay_parts import GroupSummary
from async_grpo.types import DropReason, ReissueReason, Ticket, TicketKind


class Phase(StrEnum):
    """Where the current attempt of a ticket is; the first four are open."""

    WAITING = "waiting"
    CLAIMED = "claimed"
    STORED = "stored"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


OPEN = (Phase.WAITING, Phase.CLAIMED, Phase.STORED, Phase.LEASED)
HELD = (Phase.STORED, Phase.LEASED)
"""the server holds the payload"""


@dataclass(slots=True)
class TicketState:
    """One ticket."""

    group_id: int
    prompt_index: int
    kind: TicketKind = TicketKind.TRAIN
    attempt: int = 1
    phase: Phase = Phase.WAITING
    num_lost_claims: int = 0
    instance: str = ""
    """who holds the claim"""
    generator: str = ""
    summary: GroupSummary | None = None
    """of a held group"""
    stored_order: int = 0
    """position among all stored groups, by completion"""
    draw_number: int = 0
    reason: DropReason | None = None
    reissued: ReissueReason | None = None
    """why the attempt before this one ended"""

    @property
    def key(self) -> tuple[int, int]:
        """(group_id, attempt)."""
        return self.group_id, self.attempt

    def ticket(self) -> Ticket:
        """As it is handed out."""
        return Ticket(self.group_id, self.attempt, self.prompt_index, self.kind)


@dataclass(slots=True)
class LastClaim:
    """The newest claim that one generator was granted."""

    instance: str
    number: int
    group_id: int
    attempt: int


def _open_phases() -> dict[Phase, dict[int, TicketState]]:
    return {phase: {} for phase in OPEN}


@dataclass(slots=True)
class TicketBook:
    """All tickets that are remembered."""

    remembered: int
    """ended tickets to keep"""
    tickets: dict[int, TicketState] = field(default_factory=dict)
    by_phase: dict[Phase, dict[int, TicketState]] = field(default_factory=_open_phases)
    """the open ones"""
    ended: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """the others, by the order in which they ended; a plain dict finds its first key slowly"""
    last_claims: dict[str, LastClaim] = field(default_factory=dict)
    """by generator"""
    next_group_id: int = 0
    num_stored: int = 0
    num_forgotten: int = 0

    def get(self, group_id: int) -> TicketState | None:
        """The ticket; None: never made, or forgotten."""
        return self.tickets.get(group_id)

    def count(self, *phases: Phase) -> int:
        """Tickets in any of these open phases."""
        return sum(len(self.by_phase[phase]) for phase in phases)

    def held(self) -> Iterator[TicketState]:
        """Tickets whose payload is held."""
        for phase in HELD:
            yield from self.by_phase[phase].values()

    def held_bytes(self) -> int:
        """Payload bytes of stored and leased groups."""
        return sum(ticket.summary.num_bytes for ticket in self.held() if ticket.summary)

    def oldest_waiting(self) -> TicketState | None:
        """The reopened ticket that has waited longest."""
        waiting = self.by_phase[Phase.WAITING]
        return waiting[min(waiting)] if waiting else None

    def move(self, ticket: TicketState, phase: Phase) -> None:
        """Put `ticket` into `phase`."""
        if ticket.phase in OPEN:
            del self.by_phase[ticket.phase][ticket.group_id]
        ticket.phase = phase
        if phase in OPEN:
            self.by_phase[phase][ticket.group_id] = ticket
            return
        ticket.summary, ticket.instance, ticket.generator = None, "", ""
        self.ended[ticket.group_id] = None
        while len(self.ended) > self.remembered:
            oldest, _ = self.ended.popitem(last=False)
            del self.tickets[oldest]
            self.num_forgotten += 1

    def make(self, record: Made) -> None:
        """A new ticket waits."""
        ticket = TicketState(record.group_id, record.prompt_index, record.kind)
        self.tickets[record.group_id] = ticket
        self.by_phase[Phase.WAITING][record.group_id] = ticket
        self.next_group_id = record.group_id + 1

    def claim(self, record: Claimed) -> None:
        """A waiting ticket is handed out."""
        ticket = self.tickets[record.group_id]
        ticket.instance, ticket.generator = record.instance, record.generator
        self.move(ticket, Phase.CLAIMED)
        self.last_claims[record.generator] = LastClaim(
            record.instance, record.number, record.group_id, record.attempt
        )

    def store(self, record: Stored) -> None:
        """The payload of a claimed ticket is held."""
        ticket = self.tickets[record.summary.group_id]
        ticket.summary = record.summary
        self.num_stored += 1
        ticket.stored_order = self.num_stored
        self.move(ticket, Phase.STORED)

    def drop(self, record: Dropped) -> None:
        """The ticket ends untrained."""
        ticket = self.tickets[record.group_id]
        ticket.reason = record.reason
        self.move(ticket, Phase.DROPPED)

    def reissue(self, record: Reissued) -> None:
        """The ticket waits again, as the next attempt."""
        ticket = self.tickets[record.group_id]
        if record.reason is ReissueReason.CLAIM_LOST:
            ticket.num_lost_claims += 1
        self._reopen(ticket, record.reason)

    def roll_back(self, group_id: int, attempt: int, prompt_index: int) -> None:
        """A trained ticket, maybe forgotten, waits again, as the next attempt."""
        ticket = self.tickets.get(group_id)
        if ticket is None:
            ticket = TicketState(group_id, prompt_index, attempt=attempt, phase=Phase.TRAINED)
            self.tickets[group_id] = ticket
        self.ended.pop(group_id, None)
        self._reopen(ticket, ReissueReason.ROLLED_BACK)

    def _reopen(self, ticket: TicketState, reason: ReissueReason) -> None:
        ticket.attempt += 1
        ticket.reissued = reason
        ticket.summary, ticket.instance, ticket.generator = None, "", ""
        ticket.stored_order = ticket.draw_number = 0
        self.move(ticket, Phase.WAITING)
