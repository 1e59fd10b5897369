import pytest

from async_grpo.config.staleness import DrawOrder
from async_grpo.replay_api.base import Error, ErrorCode, Ok
from async_grpo.replay_api.generator import Watch
from async_grpo.replay_api.peers import Leave
from async_grpo.replay_api.publishing import AbortCell
from async_grpo.replay_api.trainer import Draw, Fetch, FetchReply, Finish
from async_grpo.types import DropReason, ReissueReason, WeightsName
from tests.unit.replay_core.driver import Driver, engine, settings


def test_draw_waits_for_groups_per_step_groups_and_repeats_itself() -> None:
    driver = Driver().ready()
    driver.store(1)
    assert driver.draw(1, 0) is None
    driver.store(1)
    first = driver.draw(1, 0)

    assert [group.group_id for group in first.groups] == [0, 1]
    assert driver.draw(1, 0) == first
    assert driver.core.stats(0.0).leased == 2


def test_draw_reports_what_was_generated_since_the_one_before() -> None:
    driver = Driver().ready()
    ticket = driver.claim()
    assert ticket is not None
    driver.store(2)
    driver.insert(ticket.group_id, invalid="bad")
    first = driver.draw(1, 0).generated

    assert (first.num_groups, first.num_tokens, first.reward_sum) == (2, 10, 3.0)
    assert first.dropped == {DropReason.INVALID: 1}
    assert driver.draw(1, 0).generated == first
    driver.ack(0, 1, [(1, 1), (2, 1)])
    driver.publish(1, "g/0#1")
    driver.store(2, (1, 1))
    assert driver.draw(2, 1).generated.dropped == {}


def test_a_draw_in_vain_tells_what_became_of_groups_and_consumes_nothing() -> None:
    """Else a trainer whose groups all end untrained could not say why it waits."""
    driver = Driver(settings(groups_per_step=1)).ready()
    for _ in range(2):
        ticket = driver.claim()
        assert ticket is not None
        driver.end(ticket.group_id)
    draw = Draw(incarnation=1, draw_number=1, train_version=0, wait_s=1.0)
    assert driver.ask(draw, "t#1") is None
    told = driver.core.empty_reply(draw, "t#1")
    assert (told.groups, told.wishes) == ([], [])
    assert told.generated.dropped == {DropReason.NO_SIGNAL: 2}
    driver.store(1)
    assert driver.draw(1, 0).generated.dropped == {DropReason.NO_SIGNAL: 2}
    assert driver.core.empty_reply(draw, "t#1").generated.dropped == {}


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (DrawOrder.oldest_version, [1, 3]),
        (DrawOrder.completion, [0, 1]),
        (DrawOrder.ticket, [0, 1]),
    ],
)
def test_draw_order(order: DrawOrder, expected: list[int]) -> None:
    driver = Driver(settings(draw_order=order, max_staleness=3, num_train_steps=9)).ready()
    driver.store(2)
    driver.train(1, 0)
    driver.publish(1, "g/0#1")
    ids = [ticket.group_id for _ in range(4) if (ticket := driver.claim())]
    for group_id, version in zip(ids, (1, 0, 1, 0), strict=True):
        driver.insert(group_id, 1, (1, version))

    drawn = driver.draw(2, 1).groups

    assert [group.group_id - ids[0] for group in drawn] == expected


def test_ticket_order_waits_for_an_earlier_group_in_flight() -> None:
    driver = Driver(settings(draw_order=DrawOrder.ticket)).ready()
    driver.claim()
    driver.store(2)
    assert driver.draw(1, 0) is None
    driver.insert(0)

    assert [group.group_id for group in driver.draw(1, 0).groups] == [0, 1]


def test_b052_a_group_that_grew_stale_in_the_queue_is_never_handed_out() -> None:
    driver = Driver(settings(draw_order=DrawOrder.completion, num_train_steps=9)).ready()
    driver.claim()
    driver.store(2)
    driver.train(1, 0)
    driver.publish(1, "g/0#1")
    driver.store(2, (1, 1))
    assert driver.insert(0) == "stored"  # staleness 1 now, 2 at the step after the next draw
    driver.train(2, 1)
    driver.publish(2, "g/0#1")
    driver.store(2, (1, 2))

    assert [group.group_id for group in driver.draw(3, 2).groups] == [5, 6]
    assert driver.core.stats(0.0).dropped == {DropReason.STALE: 1}
    assert (0, 1) in driver.freed


def test_prefetch_draws_for_the_next_step_and_checks_age_for_it() -> None:
    driver = Driver(settings(max_staleness=0, pipeline_depth=0)).ready()
    driver.store(2)
    driver.draw(1, 0)

    assert driver.draw(2, 1) is None
    reply = driver.draw(3, 2)
    assert isinstance(reply, Error)
    assert reply.code is ErrorCode.BAD_REQUEST


def test_two_draws_cannot_hold_the_same_step() -> None:
    driver = Driver().ready()
    driver.store(4)
    driver.draw(1, 0)

    assert isinstance(driver.draw(2, 0), Error)


def test_no_draw_beyond_the_last_step() -> None:
    driver = Driver(settings(num_train_steps=1)).ready()
    driver.store(2)
    driver.train(1, 0)

    assert driver.draw(2, 1) is None


def test_engines_that_wish_weights_end_a_waiting_draw() -> None:
    driver = Driver().ready()
    driver.generator_beat(engine(weights=WeightsName(1, 0)), engine(engine_id="g/1#1"))
    assert driver.draw(1, 0).wishes == ["g/1#1"]

    driver.announce(7, 0, wished_only=True)  # an unfinished publish serves it
    assert driver.draw(1, 0) is None
    driver.store(2)
    assert driver.draw(1, 0).groups


def test_engine_that_missed_the_newest_publish_is_wished_for() -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.train(1, 0)
    reply = driver.announce(2, 1)
    driver.ask(
        AbortCell(
            incarnation=1, publish_sequence=reply.publish_sequence, cell_id=0, reason="broken"
        ),
        "t#1",
    )

    assert driver.draw(2, 1).wishes == ["g/0#1"]


def test_ack_counts_once_and_frees_payloads() -> None:
    driver = Driver().ready()
    driver.store(2)
    keys = driver.train(1, 0)

    assert isinstance(driver.ack(0, 1, keys), Ok)
    assert driver.freed == keys
    assert driver.core.stats(0.0).trained == 2


@pytest.mark.parametrize(
    ("step", "number", "groups"),
    [
        (0, 1, [(0, 1)]),
        (1, 1, [(0, 1), (1, 1)]),
        (0, 2, [(0, 1), (1, 1)]),
        (0, 1, [(0, 1), (2, 1)]),
    ],
)
def test_ack_of_anything_else_is_refused(
    step: int, number: int, groups: list[tuple[int, int]]
) -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.draw(1, 0)

    assert isinstance(driver.ack(step, number, groups), Error)
    assert driver.core.policy_version == 0


def test_repeated_ack_with_other_groups_is_refused() -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.train(1, 0)

    assert isinstance(driver.ack(0, 1, [(0, 1), (9, 1)]), Error)


def test_lease_that_the_heartbeat_does_not_list_is_released() -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.draw(1, 0)
    driver.trainer_beat(1)
    assert driver.core.stats(0.0).leased == 2
    driver.trainer_beat()

    assert driver.core.stats(0.0).stored == 2
    assert driver.draw(2, 0).groups


def test_ack_of_a_released_draw_counts_only_while_nobody_else_has_its_groups() -> None:
    driver = Driver().ready()
    driver.store(2)
    keys = [(group.group_id, group.attempt) for group in driver.draw(1, 0).groups]
    driver.trainer_beat()
    assert isinstance(driver.ack(0, 1, keys), Ok)

    other = Driver().ready()
    other.store(2)
    other.draw(1, 0)
    other.trainer_beat()
    other.draw(2, 0)
    assert other.ack(0, 1, keys).code is ErrorCode.FENCED


def test_second_trainer_waits_until_the_first_is_silent() -> None:
    driver = Driver().ready()
    assert driver.start_trainer("t#2").code is ErrorCode.TRAINER_ALIVE
    driver.tick(6.1)
    driver.generator_beat(engine(weights=WeightsName(1, 0)))

    reply = driver.start_trainer("t#2")

    assert reply.incarnation == 2
    assert driver.start_trainer("t#2") == reply
    assert driver.core.live is None
    assert driver.draw(1, 0, peer="t#1").code is ErrorCode.HELLO_REQUIRED


def test_goodbye_of_a_trainer_lets_the_next_one_start_at_once() -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.draw(1, 0)
    driver.ask(Leave(), "t#1")

    assert driver.core.stats(0.0).stored == 2
    assert driver.start_trainer("t#2").incarnation == 2


def test_request_of_an_earlier_incarnation_is_fenced() -> None:
    driver = Driver().ready()
    driver.ask(Leave(), "t#1")
    driver.start_trainer("t#2")

    assert driver.draw(1, 0, peer="t#2").code is ErrorCode.FENCED


def test_fallback_reopens_trained_tickets_and_supersedes_their_descendants() -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.train(1, 0)
    driver.publish(1, "g/0#1")
    driver.store(1, (1, 0))
    driver.store(1, (1, 1))
    driver.ask(Leave(), "t#1")
    driver.start_trainer("t#2", restored_version=0)
    driver.incarnation = 2
    stats = driver.core.stats(0.0)
    assert (stats.trained, stats.waiting, stats.policy_version) == (0, 2, 0)
    assert stats.reissued == {ReissueReason.ROLLED_BACK: 2}

    assert driver.draw(2, 0, peer="t#2") is None  # one survivor of (1, 0), the other is undone
    assert driver.core.stats(0.0).reissued[ReissueReason.SUPERSEDED] == 1
    assert driver.core.stats(0.0).stored == 1


def test_insert_of_undone_weights_is_fenced_and_the_ticket_goes_on() -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.train(1, 0)
    driver.publish(1, "g/0#1")
    ticket = driver.claim()
    assert ticket is not None
    driver.ask(Leave(), "t#1")
    driver.start_trainer("t#2", restored_version=0)

    assert driver.insert(ticket.group_id, 1, (1, 1)) == "fenced"
    assert driver.core.stats(0.0).reissued[ReissueReason.SUPERSEDED] == 1


def test_checkpoint_ahead_of_the_acks_is_refused() -> None:
    driver = Driver()
    driver.join()

    reply = driver.start_trainer(restored_version=3, restored_incarnation=1)
    assert reply.code is ErrorCode.NOT_FOUND
    assert "only 0 steps were acked" in reply.message


def test_fetch_only_of_leased_groups() -> None:
    driver = Driver().ready()
    driver.store(2)
    request = Fetch(incarnation=1, group_id=0, attempt=1)
    before = driver.ask(request, "t#1")
    driver.draw(1, 0)

    assert isinstance(before, Error)
    assert isinstance(driver.ask(request, "t#1"), FetchReply)


def test_finish_tells_generators_to_stop() -> None:
    driver = Driver().ready()
    driver.ask(Finish(incarnation=1, reason="all steps done"), "t#1")

    reply = driver.ask(Watch(seen=0, wait_s=1.0))

    assert reply is not None
    assert reply.stop == "all steps done"  # type: ignore[union-attr] # a watch reply, or it fails
    assert driver.claim() is None
