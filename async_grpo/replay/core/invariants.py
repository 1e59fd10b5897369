"""What must hold after every event."""

from async_grpo.config.staleness import OverAge
from async_grpo.replay.core.ages import newest_version
from async_grpo.replay.core.kernel import Kernel
from async_grpo.replay.core.tickets import HELD, OPEN, Phase


def check_invariants(kernel: Kernel) -> None:
    """Raise AssertionError naming the first rule that does not hold."""
    _check_accounting(kernel)
    _check_bounds(kernel)
    _check_volatile(kernel)
    _check_evaluation(kernel)


def _check_accounting(kernel: Kernel) -> None:
    state = kernel.state
    book, accounting = state.book, state.accounting
    num_open = book.count(*OPEN)
    num_dropped = sum(accounting.dropped.values())
    assert accounting.tickets == book.next_group_id, "tickets are numbered without gaps"
    assert accounting.tickets == accounting.trained + num_dropped + num_open, (
        f"tickets {accounting.tickets} != trained {accounting.trained} + dropped {num_dropped} "
        f"+ open {num_open}"
    )
    if not book.num_forgotten:
        attempts = sum(ticket.attempt for ticket in book.tickets.values())
        num_reissued = sum(accounting.reissued.values())
        assert attempts == accounting.tickets + num_reissued, (
            f"attempts {attempts} != tickets {accounting.tickets} + reissued {num_reissued}"
        )
    trained = [group for step in state.versions.steps.values() for group, _ in step.groups]
    assert len(trained) == len(set(trained)), "a group was trained twice on the surviving lineage"
    versions, per_step = state.versions, kernel.settings.groups_per_step
    assert len(trained) + versions.settled * per_step == accounting.trained, (
        "trained is the number of groups of acked steps"
    )
    assert list(versions.steps) == list(range(versions.settled, versions.policy_version)), (
        "remembered steps are settled .. policy_version - 1"
    )
    leased = sorted(key for lease in state.leases.held() for key in lease.keys)
    assert leased == sorted(ticket.key for ticket in book.by_phase[Phase.LEASED].values()), (
        "leased tickets are those of held draws"
    )


def _check_bounds(kernel: Kernel) -> None:
    settings, state = kernel.settings, kernel.state
    book, versions = state.book, state.versions
    under_way = book.count(Phase.CLAIMED, Phase.STORED, Phase.LEASED)
    assert under_way <= settings.window, f"{under_way} groups under way > {settings.window}"
    assert settings.min_depth <= state.pipeline_depth <= settings.deepest, (
        f"pipeline_depth {state.pipeline_depth} out of bounds"
    )
    left = settings.groups_per_step * (settings.num_train_steps - versions.policy_version)
    num_open = book.count(*OPEN)
    assert num_open <= left, f"{num_open} open tickets > {left} groups still to train"
    for lease in state.leases.held():
        train_version = lease.drawn.train_version
        for group in lease.drawn.groups:
            staleness = train_version - group.oldest.policy_version
            if settings.over_age is OverAge.mask_tokens:
                summary = book.tickets[group.group_id].summary
                assert summary is not None, f"leased without a summary: {group}"
                staleness = train_version - newest_version(summary)
            assert staleness <= settings.max_staleness, f"leased beyond S: {group}"
            assert versions.on_lineage(group.oldest), f"leased off-lineage: {group}"
    assert versions.live is None or versions.live.incarnation == versions.incarnation, (
        "live weights are of the current incarnation"
    )


def _check_volatile(kernel: Kernel) -> None:
    settings, book = kernel.settings, kernel.state.book
    num_groups = book.count(*HELD) + len(kernel.reserved)
    used = book.held_bytes() + sum(kernel.reserved.values())
    assert num_groups <= 1 or used <= settings.max_bytes, f"{used} bytes > {settings.max_bytes}"
    assert num_groups <= settings.max_groups, f"{num_groups} groups > {settings.max_groups}"
    for key in kernel.reserved:
        assert kernel.live_claim(*key), f"room is reserved for {key}, which is no live claim"
    for group_id in kernel.deadlines:
        assert group_id in book.by_phase[Phase.CLAIMED], f"deadline of unclaimed {group_id}"
    stored = set(book.by_phase[Phase.STORED]) - {group_id for group_id, _ in kernel.unheld}
    assert stored <= set(kernel.stored_at), "every stored group has its time"
    for ticket in book.by_phase[Phase.CLAIMED].values():
        assert kernel.members.get(ticket.instance), f"claim of {ticket.instance}, which is gone"


def _check_evaluation(kernel: Kernel) -> None:
    evals = kernel.state.evals
    evals.check()
    claimed = {ticket.group_id: ticket for ticket in evals.claimed()}
    assert set(kernel.eval_deadlines) == set(claimed), "every claimed eval ticket has a deadline"
    for ticket in claimed.values():
        assert kernel.members.get(ticket.instance), f"eval claim of {ticket.instance}, who is gone"
