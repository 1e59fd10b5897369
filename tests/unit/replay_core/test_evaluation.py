"""Evaluation rounds: apart from training, exactly once, through crashes and restarts."""

import random
from typing import Any

import pytest

from async_grpo.replay_api.generator import Claim, ClaimReply, End, EndReply, Evaluated, Watch
from async_grpo.replay_api.peers import Leave
from async_grpo.replay_api.trainer import Draw, DrawReply, EvaluationsReply, WaitEvaluations
from async_grpo.replay_parts import EndStats, EvalResult
from async_grpo.types import DropReason, Ticket, TicketKind, WeightsName
from tests.unit.replay_core.driver import Driver, engine, settings

V0 = WeightsName(1, 0)


def eval_driver(**changes: Any) -> Driver:
    """Two held-out prompts, evaluated every second step; version 0 is live."""
    return Driver(settings(**{"eval_every": 2, "eval_num_prompts": 2, **changes})).ready()


def report(driver: Driver, ticket: Ticket, reward: float = 1.0, weights: WeightsName = V0) -> Any:
    """A generator evaluated `ticket`: one completion of five tokens."""
    stats = EndStats(num_completions=1, num_tokens=5, reward_sum=reward)
    return driver.ask(
        Evaluated(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            stats=stats,
            weights_tokens=[(weights, 5)],
        )
    )


def results(driver: Driver, seen: int = 0) -> list[EvalResult] | None:
    """What the trainer hears at once; None: it has to wait."""
    reply: Any = driver.ask(
        WaitEvaluations(incarnation=driver.incarnation, seen=seen, wait_s=1.0), "t#1"
    )
    return reply.results if reply else None


def evaluate_all(driver: Driver, reward: float = 1.0) -> int:
    """Claim and report eval tickets until a train ticket comes; that one is given back."""
    count = 0
    while (ticket := driver.claim()) is not None and ticket.kind is TicketKind.EVAL:
        assert report(driver, ticket, reward) == EndReply()
        count += 1
    if ticket is not None:
        end = End(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            reason=DropReason.NO_SIGNAL,
        )
        driver.ask(end)
    return count


def miss_the_group_deadline(driver: Driver, claims: list[tuple[int, int]] | None = None) -> None:
    """generation.group_timeout_s (60 s) passes while everybody lives."""
    for _ in range(13):
        driver.tick(5.0)
        driver.generator_beat(engine(weights=V0), claims=claims)
        driver.trainer_beat()


def test_version_0_is_evaluated_before_any_train_ticket() -> None:
    driver = eval_driver()

    tickets = [driver.claim() for _ in range(3)]

    assert tickets[:2] == [
        Ticket(-1, 1, 0, TicketKind.EVAL),
        Ticket(-2, 1, 1, TicketKind.EVAL),
    ]
    assert tickets[2] is not None
    assert tickets[2].kind is TicketKind.TRAIN


def test_eval_tickets_use_no_slot() -> None:
    driver = eval_driver()

    tickets = [driver.claim() for _ in range(10)]

    kinds = [ticket.kind for ticket in tickets if ticket]
    assert kinds == [TicketKind.EVAL] * 2 + [TicketKind.TRAIN] * driver.settings.window


def test_result_is_the_sum_over_the_round() -> None:
    driver = eval_driver()
    first, second = driver.claim(), driver.claim()
    assert first is not None
    assert second is not None
    assert results(driver) is None

    report(driver, first, 1.0)
    assert results(driver) is None
    report(driver, second, 0.0, WeightsName(1, 1))

    assert results(driver) == [
        EvalResult(
            weights=V0,
            num_evaluated=2,
            num_completions=2,
            num_tokens=10,
            reward_sum=1.0,
            weights_tokens=[(V0, 5), (WeightsName(1, 1), 5)],
        )
    ]
    assert results(driver, seen=1) is None


def test_counted_apart_from_train_tickets() -> None:
    driver = eval_driver()
    first, second = driver.claim(), driver.claim()
    assert first is not None
    assert second is not None
    report(driver, first)
    driver.ask(End(group_id=-2, attempt=1, reason=DropReason.REWARD_FAILED, detail="hangs"))

    stats = driver.core.stats(0.0)
    assert (stats.eval_tickets, stats.eval_evaluated, stats.eval_failed) == (2, 1, 1)
    assert (stats.tickets, stats.dropped, stats.claimed) == (0, {}, 0)


def test_repeated_reports_count_once_and_late_ones_are_fenced() -> None:
    driver = eval_driver()
    ticket = driver.claim()
    assert ticket is not None
    assert report(driver, ticket) == EndReply()
    assert report(driver, ticket) == EndReply()
    end = End(group_id=ticket.group_id, attempt=1, reason=DropReason.GENERATION_FAILED)
    assert driver.ask(end) == EndReply(fenced=True)

    assert driver.core.stats(0.0).eval_evaluated == 1


def test_repeated_claim_gets_the_same_eval_ticket_also_after_a_restart() -> None:
    driver = eval_driver()
    ticket = driver.claim()
    assert driver.ask(Claim(number=1, wait_s=1.0)) == ClaimReply(ticket=ticket)

    driver.restart()

    assert driver.ask(Claim(number=1, wait_s=1.0)) == ClaimReply(ticket=ticket)


def test_lost_claim_is_reissued_then_fails() -> None:
    driver = eval_driver(eval_num_prompts=1)
    first = driver.claim()
    assert first is not None
    for attempt in (2, 3):
        miss_the_group_deadline(driver)
        assert driver.claim() == Ticket(-1, attempt, 0, TicketKind.EVAL)
    assert report(driver, first) == EndReply(fenced=True)
    miss_the_group_deadline(driver)

    found = results(driver)
    assert found is not None
    assert (found[0].num_evaluated, found[0].num_failed) == (0, 1)


def test_leaving_generator_gives_its_eval_claim_back() -> None:
    driver = eval_driver()
    driver.claim()
    driver.ask(Leave())
    driver.join("h")
    driver.generator_beat(engine("h", V0), peer="h#1")
    driver.claim_number = 0

    assert driver.claim("h#1") == Ticket(-1, 2, 0, TicketKind.EVAL)


def test_reissued_attempt_is_cancelled_at_its_generator() -> None:
    driver = eval_driver()
    driver.claim()
    driver.generator_beat(engine(weights=V0), claims=[(-1, 1)])
    miss_the_group_deadline(driver, claims=[(-1, 1)])

    reply: Any = driver.ask(Watch(seen=-1, wait_s=0.0))

    assert reply.cancel == [(-1, 1)]


def test_rounds_follow_the_live_version_and_the_last_one_is_evaluated() -> None:
    driver = eval_driver()  # three steps, every second one
    versions = []
    for step in range(4):
        if evaluate_all(driver):
            versions.append(step)
        if step < 3:
            driver.store(2, (1, step))
            driver.train(step + 1, step)
            driver.publish(step + 1, "g/0#1")

    assert versions == [0, 2, 3]
    found = results(driver)
    assert found is not None
    assert [result.weights.policy_version for result in found] == [0, 2, 3]


def test_version_that_comes_during_a_round_is_passed_over_and_the_last_is_not() -> None:
    driver = eval_driver()
    slow, second = driver.claim(), driver.claim()
    assert slow is not None
    assert second is not None
    report(driver, second)
    for step in range(3):
        driver.store(2, (1, step))
        driver.train(step + 1, step)
        driver.publish(step + 1, "g/0#1")
    report(driver, slow)

    assert evaluate_all(driver) == 2
    found = results(driver)
    assert found is not None
    assert [result.weights.policy_version for result in found] == [0, 3]


def test_never_drawn() -> None:
    driver = eval_driver()
    evaluate_all(driver)

    draw = Draw(incarnation=1, draw_number=1, train_version=0, wait_s=1.0)
    reply = driver.ask(draw, "t#1")

    assert reply is None or reply == DrawReply()


def test_new_trainer_fails_the_open_round_and_evaluates_anew() -> None:
    driver = eval_driver()
    ticket = driver.claim()
    assert ticket is not None
    driver.ask(Leave(), "t#1")
    driver.incarnation = 2
    driver.start_trainer("t#2")
    assert report(driver, ticket) == EndReply(fenced=True)
    driver.publish(0, "g/0#1")

    assert driver.claim() == Ticket(-3, 1, 0, TicketKind.EVAL)
    assert driver.core.stats(0.0).eval_failed == 2


def test_off_by_default() -> None:
    ticket = Driver().ready().claim()

    assert ticket is not None
    assert ticket.kind is TicketKind.TRAIN


def test_empty_reply_at_the_deadline() -> None:
    driver = eval_driver()
    request = WaitEvaluations(incarnation=1, seen=0, wait_s=1.0)

    assert driver.core.empty_reply(request, "t#1") == EvaluationsReply()


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules_close_the_books_and_survive_restarts(seed: int) -> None:
    """Claims, reports, repeated reports, losses and server restarts in any order."""
    chance = random.Random(f"evaluation {seed}")
    driver = eval_driver(eval_num_prompts=4)
    held: list[Ticket] = []
    reported: list[Ticket] = []
    for _ in range(150):
        match chance.choice(["claim", "report", "again", "fail", "leave", "restart", "wait"]):
            case "claim":
                ticket = driver.claim()
                if ticket is not None and ticket.kind is TicketKind.EVAL:
                    held.append(ticket)
            case "report" if held:
                ticket = held.pop(chance.randrange(len(held)))
                report(driver, ticket)
                reported.append(ticket)
            case "again" if reported:
                report(driver, chance.choice(reported))
            case "fail" if held:
                ticket = held.pop()
                reason = DropReason.REWARD_FAILED
                driver.ask(End(group_id=ticket.group_id, attempt=ticket.attempt, reason=reason))
            case "leave":
                driver.ask(Leave())
                driver.join()
                driver.generator_beat(engine(weights=V0))
            case "restart":
                before = driver.core.stats(driver.now)
                driver.restart()
                driver.join()
                driver.generator_beat(engine(weights=V0))
                after = driver.core.stats(driver.now)
                assert after.eval_evaluated == before.eval_evaluated
                assert after.eval_tickets == before.eval_tickets
            case "wait":
                driver.tick(1.0)
                driver.generator_beat(engine(weights=V0))
                driver.trainer_beat()
    stats = driver.core.stats(driver.now)
    assert stats.eval_tickets == stats.eval_evaluated + stats.eval_failed + stats.eval_open
    assert stats.eval_evaluated <= len({ticket.group_id for ticket in reported})
