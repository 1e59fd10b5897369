"""What generators ask: claim, credit, insert, end, watch, phases, heartbeat.

Each function returns the reply, or None for a long poll that has nothing to say yet. Applied again
after a lost reply, it answers the same and changes nothing.
"""

from async_grpo.replay.core import eval_requests
from async_grpo.replay.core.kernel import Kernel, refuse
from async_grpo.replay.core.members import Member
from async_grpo.replay.core.records import Claimed, Made, Stored
from async_grpo.replay.core.tickets import Phase, TicketState
from async_grpo.replay_api.base import Error, Ok
from async_grpo.replay_api.generator import (
    Claim,
    ClaimReply,
    Credit,
    CreditReply,
    End,
    EndReply,
    EnginePhase,
    GeneratorHeartbeat,
    Insert,
    InsertReply,
    Watch,
    WatchReply,
)
from async_grpo.replay_parts import CellPhase, EndStats, EngineState, GroupSummary
from async_grpo.types import DropReason, InsertOutcome, ReissueReason, TicketKind

_DONE = (Phase.STORED, Phase.LEASED, Phase.TRAINED)


def claim(kernel: Kernel, member: Member, request: Claim, now: float) -> ClaimReply | None:
    """Hand out an eval ticket, else, if admission allows, the oldest waiting or a new one."""
    book = kernel.state.book
    last = book.last_claims.get(member.name)
    if last and last.instance == member.instance and request.number <= last.number:
        known = kernel.live_claim(last.group_id, last.attempt) or kernel.state.evals.live_claim(
            last.group_id, last.attempt
        )
        if request.number == last.number and known is not None:
            return ClaimReply(ticket=known.ticket())
        return ClaimReply()
    live = kernel.state.versions.live
    if live is None or not member.has_weights(live):
        return None
    if evaluation := eval_requests.hand_out(kernel, member, request, now):
        return ClaimReply(ticket=evaluation)
    if not kernel.admits():
        return None
    ticket = book.oldest_waiting()
    if ticket is None:
        if kernel.state.dataset is None:
            return None
        group_id = book.next_group_id
        prompt_index = kernel.state.prompt_order.prompt_index(group_id)
        kernel.emit(Made(group_id=group_id, prompt_index=prompt_index, kind=TicketKind.TRAIN))
        ticket = book.tickets[group_id]
    group_id, attempt = ticket.key
    kernel.emit(
        Claimed(
            group_id=group_id,
            attempt=attempt,
            instance=member.instance,
            generator=member.name,
            number=request.number,
        )
    )
    kernel.deadlines[group_id] = now + kernel.settings.group_timeout_s
    return ClaimReply(ticket=ticket.ticket())


def credit(kernel: Kernel, member: Member, request: Credit, now: float) -> CreditReply | None:
    """Reserve room for a claimed attempt."""
    key = (request.group_id, request.attempt)
    if kernel.live_claim(*key) is None:
        return CreditReply(granted=False, fenced=True)
    kernel.deadlines.pop(request.group_id, None)
    if kernel.reserved.get(key, -1) >= request.num_bytes:
        return CreditReply(granted=True)
    if not kernel.fits(key, request.num_bytes):
        return None
    kernel.reserved[key] = request.num_bytes
    return CreditReply(granted=True)


def insert(kernel: Kernel, member: Member, request: Insert, now: float) -> InsertReply | Error:
    """Take a finished group in, or say why not."""
    ticket = kernel.live_claim(request.group_id, request.attempt)
    if ticket is None:
        return InsertReply(outcome=_outcome_so_far(kernel, request))
    kernel.deadlines.pop(request.group_id, None)
    summary, invalid = request.summary, request.invalid
    if not invalid and summary is None:
        return refuse("an insert reached the core without a summary")
    if not invalid and summary is not None and not summary.weights_tokens:
        invalid = "no token was sampled by named weights"
    if not invalid and summary is not None:
        invalid = kernel.why_impossible(summary)
    if invalid or summary is None:
        kernel.drop(ticket, DropReason.INVALID, invalid)
        return InsertReply(outcome=InsertOutcome.INVALID, detail=invalid)
    return _store(kernel, ticket, summary, now)


def _store(kernel: Kernel, ticket: TicketState, summary: GroupSummary, now: float) -> InsertReply:
    """Store a well-formed group of a live claim, unless it is too old or there is no room."""
    if not kernel.on_lineage(summary):
        kernel.reissue(ticket, ReissueReason.SUPERSEDED)
        detail = "sampled by weights that a later incarnation has undone"
        return InsertReply(outcome=InsertOutcome.FENCED, detail=detail)
    if why := kernel.why_refused(summary):
        stats = EndStats(
            num_completions=summary.num_completions,
            num_tokens=summary.num_tokens,
            reward_sum=summary.reward_sum,
        )
        kernel.end_stale(ticket, why, stats)
        return InsertReply(outcome=InsertOutcome.STALE, detail=why)
    promised = kernel.reserved.get(ticket.key, -1)
    if promised < summary.num_bytes and not kernel.fits(ticket.key, summary.num_bytes):
        return InsertReply(outcome=InsertOutcome.FULL)
    kernel.reserved.pop(ticket.key, None)
    kernel.emit(Stored(summary=summary))
    kernel.stored_at[ticket.group_id] = now
    return InsertReply(outcome=InsertOutcome.STORED)


def _outcome_so_far(kernel: Kernel, request: Insert) -> InsertOutcome:
    """The answer to an insert of an attempt that is no live claim."""
    ticket = kernel.state.book.get(request.group_id)
    if ticket is None:
        return InsertOutcome.FENCED
    if request.attempt == ticket.attempt:
        if ticket.phase in _DONE:
            return InsertOutcome.DUPLICATE
        if ticket.reason is DropReason.STALE:
            return InsertOutcome.STALE
        if ticket.reason is DropReason.INVALID:
            return InsertOutcome.INVALID
    if request.attempt == ticket.attempt - 1 and ticket.reissued is ReissueReason.REQUEUED:
        return InsertOutcome.STALE
    return InsertOutcome.FENCED


def end(kernel: Kernel, member: Member, request: End, now: float) -> EndReply:
    """The generator gives the ticket up."""
    if request.group_id < 0:
        return eval_requests.end(kernel, request)
    claimed = kernel.live_claim(request.group_id, request.attempt)
    if claimed is not None:
        kernel.drop(claimed, request.reason, request.detail, request.stats)
        return EndReply()
    ticket = kernel.state.book.get(request.group_id)
    ended = (
        ticket is not None and ticket.phase is Phase.DROPPED and ticket.attempt == request.attempt
    )
    return EndReply(fenced=not ended)


def watch_now(kernel: Kernel, member: Member) -> WatchReply:
    """What this generator must know."""
    known = {engine.engine_id for engine in member.engines}
    return WatchReply(
        revision=member.revision,
        orders=list(kernel.desk.orders(member.name, known)),
        cancel=[key for key in member.claims if _is_over(kernel, *key)],
        live=kernel.state.versions.live,
        stop=kernel.over,
    )


def _is_over(kernel: Kernel, group_id: int, attempt: int) -> bool:
    """Whether an attempt ended without being stored, so that its insert would be fenced."""
    if group_id < 0:
        return eval_requests.is_over(kernel, group_id, attempt)
    ticket = kernel.state.book.get(group_id)
    if ticket is None or ticket.attempt > attempt:
        return True
    return ticket.attempt == attempt and ticket.phase is Phase.DROPPED


def watch(kernel: Kernel, member: Member, request: Watch, now: float) -> WatchReply | None:
    """Answer once something has changed; a restarted server's revisions start anew."""
    return watch_now(kernel, member) if request.seen != member.revision else None


def engine_phase(kernel: Kernel, member: Member, request: EnginePhase, now: float) -> Ok:
    """Note how far an engine has come; a report about a publish that is over changes nothing."""
    progress = kernel.desk.cell(request.publish_sequence, request.cell_id)
    if progress and progress.advance(
        request.engine_id, request.phase, request.detail, request.report
    ):
        if request.phase is CellPhase.COMMITTED:
            weights = kernel.desk.weights(request.publish_sequence)
            member.commit(request.engine_id, weights, request.publish_sequence)
        kernel.notify(progress.generators)
        kernel.check_live()
    return Ok()


def heartbeat(kernel: Kernel, member: Member, request: GeneratorHeartbeat, now: float) -> Ok:
    """Take over the generator's view of its engines; a vanished or dead one fails its update."""
    member.last_seen = now
    member.claims, member.status = request.claims, request.status
    before = {engine.engine_id for engine in member.engines}
    changed = member.merge(request.engines)
    gone = before - {engine.engine_id for engine in member.engines}
    gone |= {e.engine_id for e in member.engines if e.state is EngineState.DEAD}
    news = {member.name} if changed else set()
    for engine_id in sorted(gone):
        news |= kernel.desk.fail(engine_id, "gone from its generator")
    for engine in member.engines:
        if engine.weights is not None:
            news |= kernel.desk.observe(engine)
    if news:
        kernel.notify(news)
        kernel.check_live()
    return Ok()
