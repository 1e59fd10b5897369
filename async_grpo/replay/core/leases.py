"""Leases: the trainer's draws. Durable; changed by evolve only. Also: which groups a draw takes."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from async_grpo.config.staleness import DrawOrder
from async_grpo.replay.core.ages import oldest_name
from async_grpo.replay.core.records import Drawn
from async_grpo.replay.core.tickets import Phase, TicketBook, TicketState


@dataclass(slots=True)
class Lease:
    """One draw that is not acked."""

    drawn: Drawn
    released: bool = False
    """its groups are stored again; the draw is remembered because its ack may be on the way"""

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(group_id, attempt) of its groups."""
        return [(group.group_id, group.attempt) for group in self.drawn.groups]


@dataclass(slots=True)
class Leases:
    """Draws of the current incarnation."""

    draws: dict[int, Lease] = field(default_factory=dict)
    last_draw_number: int = 0

    def held(self) -> list[Lease]:
        """Draws whose groups are leased."""
        return [lease for lease in self.draws.values() if not lease.released]

    def draw(self, record: Drawn) -> None:
        """The trainer takes groups."""
        self.draws[record.draw_number] = Lease(record)
        self.last_draw_number = max(self.last_draw_number, record.draw_number)

    def forget_before(self, train_version: int) -> None:
        """Drop released draws for steps that are over."""
        self.draws = {
            number: lease
            for number, lease in self.draws.items()
            if not lease.released or lease.drawn.train_version >= train_version
        }


def choose(book: TicketBook, order: DrawOrder, num_groups: int) -> list[TicketState]:
    """The next `num_groups` stored groups by `order`; empty if they are not there yet.

    With `DrawOrder.ticket` a group still being generated holds back the later ones. A reopened
    ticket that waits does not: the later ones may fill the window that its claim needs.
    """
    stored: Iterable[TicketState] = book.by_phase[Phase.STORED].values()
    if order is DrawOrder.completion:
        chosen = sorted(stored, key=lambda ticket: ticket.stored_order)
    elif order is DrawOrder.ticket:
        claimed = book.by_phase[Phase.CLAIMED]
        first_missing = min(claimed, default=book.next_group_id)
        chosen = sorted(
            (ticket for ticket in stored if ticket.group_id < first_missing),
            key=lambda ticket: ticket.group_id,
        )
    else:
        chosen = sorted(stored, key=_oldest_first)
    return chosen[:num_groups] if len(chosen) >= num_groups else []


def _oldest_first(ticket: TicketState) -> tuple[int, int]:
    assert ticket.summary is not None, f"group {ticket.key} has no summary"
    return oldest_name(ticket.summary).policy_version, ticket.group_id
