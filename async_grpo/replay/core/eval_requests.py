"""Requests about evaluation: a generator claims and reports, the trainer waits for results.

Each function returns the reply, or None for a long poll that has nothing to say yet. Applied again
after a lost reply, it answers the same and changes nothing.
"""

from async_grpo.replay.core.evaluation import EvalPhase
from async_grpo.replay.core.kernel import Kernel
from async_grpo.replay.core.members import Member
from async_grpo.replay.core.records import EvalClaimed, EvalEnded
from async_grpo.replay_api.base import Error
from async_grpo.replay_api.generator import Claim, End, EndReply, Evaluated
from async_grpo.replay_api.trainer import EvaluationsReply, WaitEvaluations
from async_grpo.types import Ticket


def hand_out(kernel: Kernel, member: Member, request: Claim, now: float) -> Ticket | None:
    """The next eval ticket, if a round is open; no admission applies: it uses no slot."""
    ticket = kernel.state.evals.waiting()
    if ticket is None or kernel.state.versions.finished:
        return None
    group_id, attempt = ticket.key
    kernel.emit(
        EvalClaimed(
            group_id=group_id,
            attempt=attempt,
            instance=member.instance,
            generator=member.name,
            number=request.number,
        )
    )
    kernel.eval_deadlines[group_id] = now + kernel.settings.group_timeout_s
    return ticket.ticket()


def evaluated(kernel: Kernel, member: Member, request: Evaluated, now: float) -> EndReply:
    """An eval ticket was sampled and scored."""
    key = (request.group_id, request.attempt)
    if kernel.state.evals.live_claim(*key) is None:
        return EndReply(fenced=not _ended(kernel, *key, EvalPhase.EVALUATED))
    kernel.end_evaluation(
        EvalEnded(
            group_id=request.group_id,
            attempt=request.attempt,
            stats=request.stats,
            weights_tokens=request.weights_tokens,
        )
    )
    return EndReply()


def end(kernel: Kernel, request: End) -> EndReply:
    """The generator gives an eval ticket up."""
    key = (request.group_id, request.attempt)
    if kernel.state.evals.live_claim(*key) is None:
        return EndReply(fenced=not _ended(kernel, *key, EvalPhase.FAILED))
    detail = f"{request.reason.value}: {request.detail}"
    kernel.end_evaluation(
        EvalEnded(group_id=request.group_id, attempt=request.attempt, failed=True, detail=detail)
    )
    return EndReply()


def _ended(kernel: Kernel, group_id: int, attempt: int, phase: EvalPhase) -> bool:
    """Whether this very attempt ended so before: the report is a repeated one."""
    ticket = kernel.state.evals.get(group_id)
    return ticket is not None and (ticket.attempt, ticket.phase) == (attempt, phase)


def is_over(kernel: Kernel, group_id: int, attempt: int) -> bool:
    """Whether an eval attempt that a generator works on is of no use any more."""
    return kernel.state.evals.live_claim(group_id, attempt) is None


def wait_evaluations(
    kernel: Kernel, member: Member, request: WaitEvaluations, now: float
) -> EvaluationsReply | Error | None:
    """Answer once a round has finished that the trainer has not seen."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    reply = evaluations_now(kernel, request)
    return reply if reply.results else None


def evaluations_now(kernel: Kernel, request: WaitEvaluations) -> EvaluationsReply:
    """Results beyond the first `seen`."""
    return EvaluationsReply(results=kernel.state.evals.results[max(0, request.seen) :])
