"""Durable state as a whole: nothing changes it but `evolve(record)`.

Hence a state rebuilt from the ledger equals the one that wrote it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from async_grpo.replay.core.accounting import Accounting
from async_grpo.replay.core.evaluation import EvalBook
from async_grpo.replay.core.keeping import length_bin
from async_grpo.replay.core.leases import Leases
from async_grpo.replay.core.prompt_order import PromptOrder
from async_grpo.replay.core.records import (
    Announced,
    Claimed,
    DatasetAgreed,
    DepthSet,
    Drawn,
    Dropped,
    EvalClaimed,
    EvalEnded,
    EvalOpened,
    EvalReissued,
    Finished,
    Made,
    Record,
    Reissued,
    Released,
    RunNamed,
    Settled,
    Stored,
    Trained,
    TrainerStarted,
    WentLive,
)
from async_grpo.replay.core.tickets import LastClaim, Phase, TicketBook
from async_grpo.replay.core.versions import Versions
from async_grpo.replay_parts import Dataset, GeneratedStats
from async_grpo.types import DropReason, ReissueReason


@dataclass(slots=True)
class State:
    """Everything that survives a restart."""

    seed: int
    book: TicketBook
    pipeline_depth: int
    """D as admission goes by it"""
    versions: Versions = field(default_factory=Versions)
    leases: Leases = field(default_factory=Leases)
    accounting: Accounting = field(default_factory=Accounting)
    evals: EvalBook = field(default_factory=EvalBook)
    dataset: Dataset | None = None
    run_token: str = ""
    """empty before the first hello"""

    @property
    def prompt_order(self) -> PromptOrder:
        """Known once a generator has named the dataset."""
        assert self.dataset is not None, "no generator has named the dataset"
        return PromptOrder(seed=self.seed, num_prompts=self.dataset.num_prompts)

    def evolve(self, record: Record) -> None:
        """Let one fact take effect."""
        _EVOLVE[type(record)](self, record)


def _run_named(state: State, record: RunNamed) -> None:
    state.run_token = record.token


def _dataset_agreed(state: State, record: DatasetAgreed) -> None:
    state.dataset = Dataset(fingerprint=record.fingerprint, num_prompts=record.num_prompts)


def _made(state: State, record: Made) -> None:
    state.book.make(record)
    state.accounting.tickets += 1


def _claimed(state: State, record: Claimed) -> None:
    state.book.claim(record)


def _stored(state: State, record: Stored) -> None:
    state.book.store(record)
    state.accounting.finish_group(record.summary)


def _dropped(state: State, record: Dropped) -> None:
    held = state.book.tickets[record.group_id].summary
    if held is None and record.stats.num_completions:
        state.accounting.finish_group(record.stats)
    figures = held or record.stats
    state.book.drop(record)
    state.accounting.drop(record.reason, figures)
    if record.reason is DropReason.STALE:
        state.accounting.kept.stale[length_bin(figures)] += 1


def _reissued(state: State, record: Reissued) -> None:
    held = state.book.tickets[record.group_id].summary
    if held is None and record.stats.num_completions:
        state.accounting.finish_group(record.stats)
    if record.reason is ReissueReason.REQUEUED:
        state.accounting.kept.stale[length_bin(held or record.stats)] += 1
    state.book.reissue(record)
    state.accounting.reissue(record.reason, (held or record.stats).num_tokens)


def _drawn(state: State, record: Drawn) -> None:
    for group in record.groups:
        ticket = state.book.tickets[group.group_id]
        ticket.draw_number = record.draw_number
        state.book.move(ticket, Phase.LEASED)
    state.leases.draw(record)
    state.accounting.recent = GeneratedStats()


def _released(state: State, record: Released) -> None:
    lease = state.leases.draws[record.draw_number]
    lease.released = True
    _store_again(state, lease.keys)


def _store_again(state: State, keys: list[tuple[int, int]]) -> None:
    for group_id, _ in keys:
        ticket = state.book.tickets[group_id]
        ticket.draw_number = 0
        state.book.move(ticket, Phase.STORED)


def _trained(state: State, record: Trained) -> None:
    for group_id, _ in record.groups:
        ticket = state.book.tickets[group_id]
        assert ticket.summary is not None, f"trained group {ticket.key} has no summary"
        state.accounting.kept.trained[length_bin(ticket.summary)] += 1
        state.book.move(ticket, Phase.TRAINED)
    state.leases.draws.pop(record.draw_number, None)
    state.leases.forget_before(record.step + 1)
    state.versions.train(record)
    state.accounting.trained += len(record.groups)


def _settled(state: State, record: Settled) -> None:
    state.versions.settle(record)


def _trainer_started(state: State, record: TrainerStarted) -> None:
    for lease in state.leases.held():
        _store_again(state, lease.keys)
    state.leases.draws.clear()
    state.evals.start_trainer(record)
    for step in state.versions.start(record):
        for group_id, attempt in step.groups:
            prompt_index = state.prompt_order.prompt_index(group_id)
            state.book.roll_back(group_id, attempt, prompt_index)
        state.accounting.trained -= len(step.groups)
        state.accounting.reissued[ReissueReason.ROLLED_BACK] += len(step.groups)


def _announced(state: State, record: Announced) -> None:
    state.versions.announced = record
    state.versions.publish_sequence = record.publish_sequence


def _went_live(state: State, record: WentLive) -> None:
    state.versions.live = record.weights


def _eval_opened(state: State, record: EvalOpened) -> None:
    state.evals.open_round(record)


def _eval_claimed(state: State, record: EvalClaimed) -> None:
    state.evals.claim(record)
    state.book.last_claims[record.generator] = LastClaim(
        record.instance, record.number, record.group_id, record.attempt
    )


def _eval_ended(state: State, record: EvalEnded) -> None:
    state.evals.end(record)


def _eval_reissued(state: State, record: EvalReissued) -> None:
    state.evals.reissue(record)


def _depth_set(state: State, record: DepthSet) -> None:
    state.pipeline_depth = record.depth


def _finished(state: State, record: Finished) -> None:
    state.versions.finished = record.reason


_EVOLVE = cast(
    dict[type, Callable[[State, Any], None]],
    {
        RunNamed: _run_named,
        DatasetAgreed: _dataset_agreed,
        Made: _made,
        Claimed: _claimed,
        Stored: _stored,
        Dropped: _dropped,
        Reissued: _reissued,
        Drawn: _drawn,
        Released: _released,
        Trained: _trained,
        Settled: _settled,
        TrainerStarted: _trainer_started,
        Announced: _announced,
        WentLive: _went_live,
        EvalOpened: _eval_opened,
        EvalClaimed: _eval_claimed,
        EvalEnded: _eval_ended,
        EvalReissued: _eval_reissued,
        DepthSet: _depth_set,
        Finished: _finished,
    },
)
