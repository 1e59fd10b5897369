"""Evaluation rounds: tickets that use no slots and are never drawn. Changed by evolve only.

A round is `num_prompts` tickets, opened when a due version goes live; at most one is open. Its
group ids are -1, -2, ..., so that no train ticket can be meant by one. Each ticket ends as
evaluated or failed. Knows nothing of time and of peers' health.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from async_grpo.replay.core.records import (
    EvalClaimed,
    EvalEnded,
    EvalOpened,
    EvalReissued,
    TrainerStarted,
)
from async_grpo.replay_parts import EvalResult
from async_grpo.types import Ticket, TicketKind, WeightsName


class EvalPhase(StrEnum):
    """Where an eval ticket is; the first two are open."""

    WAITING = "waiting"
    CLAIMED = "claimed"
    EVALUATED = "evaluated"
    FAILED = "failed"


OPEN = (EvalPhase.WAITING, EvalPhase.CLAIMED)


@dataclass(slots=True)
class EvalTicket:
    """One held-out prompt of one round."""

    group_id: int
    prompt_index: int
    attempt: int = 1
    phase: EvalPhase = EvalPhase.WAITING
    num_lost_claims: int = 0
    instance: str = ""
    """who holds the claim"""
    generator: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """(group_id, attempt)."""
        return self.group_id, self.attempt

    def ticket(self) -> Ticket:
        """As it is handed out."""
        return Ticket(self.group_id, self.attempt, self.prompt_index, TicketKind.EVAL)


@dataclass(slots=True)
class EvalBook:
    """The newest round, the totals, and the results of all finished rounds."""

    weights: WeightsName | None = None
    """that the newest round was opened for; None: none since the trainer started"""
    tickets: dict[int, EvalTicket] = field(default_factory=dict)
    """of the newest round"""
    num_tickets: int = 0
    num_evaluated: int = 0
    num_failed: int = 0
    num_reissued: int = 0
    results: list[EvalResult] = field(default_factory=list)
    sums: EvalResult | None = None
    tokens: dict[WeightsName, int] = field(default_factory=dict)

    def get(self, group_id: int) -> EvalTicket | None:
        """The ticket, if it is of the newest round."""
        return self.tickets.get(group_id)

    def open(self) -> Iterator[EvalTicket]:
        """Waiting and claimed tickets, oldest first."""
        return (ticket for ticket in self.tickets.values() if ticket.phase in OPEN)

    @property
    def num_open(self) -> int:
        """Waiting and claimed tickets."""
        return sum(1 for _ in self.open())

    def claimed(self) -> list[EvalTicket]:
        """Tickets that a generator works on."""
        return [ticket for ticket in self.open() if ticket.phase is EvalPhase.CLAIMED]

    def waiting(self) -> EvalTicket | None:
        """The next ticket to hand out."""
        return next((t for t in self.open() if t.phase is EvalPhase.WAITING), None)

    def live_claim(self, group_id: int, attempt: int) -> EvalTicket | None:
        """The claimed ticket, if this attempt of it is the current one."""
        ticket = self.tickets.get(group_id)
        if ticket and ticket.phase is EvalPhase.CLAIMED and ticket.attempt == attempt:
            return ticket
        return None

    def due(
        self, live: WeightsName | None, *, every: int, num_prompts: int, last_version: int
    ) -> EvalOpened | None:
        """The round to open now that `live` is live; None: nothing is due."""
        if not every or live is None or self.num_open:
            return None
        if self.weights is not None:
            next_version = (self.weights.policy_version // every + 1) * every
            reached = live.policy_version >= next_version or live.policy_version == last_version
            if live == self.weights or not reached:
                return None
        return EvalOpened(
            weights=live, first_group_id=-(self.num_tickets + 1), num_prompts=num_prompts
        )

    # -- evolve -------------------------------------------------------------------------------

    def open_round(self, record: EvalOpened) -> None:
        """A new round: every ticket waits."""
        self.weights = record.weights
        self.tickets = {
            record.first_group_id - index: EvalTicket(record.first_group_id - index, index)
            for index in range(record.num_prompts)
        }
        self.num_tickets += record.num_prompts
        self.sums = EvalResult(weights=record.weights)
        self.tokens = {}

    def claim(self, record: EvalClaimed) -> None:
        """A waiting ticket is handed out."""
        ticket = self.tickets[record.group_id]
        ticket.phase = EvalPhase.CLAIMED
        ticket.instance, ticket.generator = record.instance, record.generator

    def reissue(self, record: EvalReissued) -> None:
        """The claim was lost; the ticket waits again, as the next attempt."""
        ticket = self.tickets[record.group_id]
        ticket.phase = EvalPhase.WAITING
        ticket.attempt += 1
        ticket.num_lost_claims += 1
        ticket.instance = ticket.generator = ""
        self.num_reissued += 1

    def end(self, record: EvalEnded) -> None:
        """A ticket is over; with the last one, so is the round."""
        ticket = self.tickets[record.group_id]
        ticket.instance = ticket.generator = ""
        sums = self.sums
        assert sums is not None, "an eval ticket ended outside a round"
        if record.failed:
            ticket.phase = EvalPhase.FAILED
            self.num_failed += 1
        else:
            ticket.phase = EvalPhase.EVALUATED
            self.num_evaluated += 1
            for weights, num_tokens in record.weights_tokens:
                self.tokens[weights] = self.tokens.get(weights, 0) + num_tokens
        self.sums = EvalResult(
            weights=sums.weights,
            num_evaluated=sums.num_evaluated + (not record.failed),
            num_failed=sums.num_failed + record.failed,
            num_completions=sums.num_completions + record.stats.num_completions,
            num_tokens=sums.num_tokens + record.stats.num_tokens,
            reward_sum=sums.reward_sum + record.stats.reward_sum,
            weights_tokens=sorted(self.tokens.items()),
        )
        if not self.num_open:
            self.results.append(self.sums)

    def start_trainer(self, record: TrainerStarted) -> None:
        """What was being evaluated may be undone: open tickets fail, the round has no result."""
        for ticket in self.open():
            ticket.phase = EvalPhase.FAILED
            ticket.instance = ticket.generator = ""
            self.num_failed += 1
        self.weights = None

    def check(self) -> None:
        """Raise AssertionError if the books do not close."""
        total = self.num_evaluated + self.num_failed + self.num_open
        assert self.num_tickets == total, (
            f"eval tickets {self.num_tickets} != evaluated {self.num_evaluated} + failed "
            f"{self.num_failed} + open {self.num_open}"
        )
        assert all(ticket.group_id < 0 for ticket in self.tickets.values()), (
            "eval tickets have negative group ids"
        )
