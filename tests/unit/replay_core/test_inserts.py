import pytest

from async_grpo.config.staleness import OnStale
from async_grpo.replay.core.records import Dropped
from async_grpo.replay_api.generator import Credit, CreditReply
from async_grpo.types import DropReason, ReissueReason, WeightsName
from tests.unit.replay_core.driver import Driver, engine, settings


def test_insert_is_stored_once() -> None:
    driver = Driver().ready()
    driver.claim()

    assert [driver.insert(0), driver.insert(0)] == ["stored", "duplicate"]
    assert driver.core.stats(0.0).stored_bytes == 10


def test_duplicate_is_told_of_a_leased_and_a_trained_group() -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.draw(1, 0)
    assert driver.insert(0) == "duplicate"
    driver.train(1, 0)
    assert driver.insert(0) == "duplicate"


def test_late_insert_of_a_lost_claim_is_fenced() -> None:
    driver = Driver(settings(group_timeout_s=1.0)).ready()
    driver.claim()
    driver.tick(1.1)
    assert driver.claim() is not None

    assert driver.insert(0, 1) == "fenced"
    assert driver.credit(0, 1).fenced
    assert driver.end(0, 1).fenced
    assert driver.insert(0, 2) == "stored"


def test_insert_of_a_ticket_that_was_never_made_is_fenced() -> None:
    assert Driver().ready().insert(77) == "fenced"


def test_stale_insert_drops_the_ticket_and_says_so_again() -> None:
    driver = Driver(settings(max_staleness=1, pipeline_depth=1)).ready()
    driver.claim()
    driver.claim()
    driver.store(2)
    driver.train(1, 0)
    driver.publish(1, "g/0#1")
    driver.store(2, (1, 1))
    driver.train(2, 1)

    assert [driver.insert(0), driver.insert(0)] == ["stale", "stale"]
    assert driver.core.stats(0.0).dropped == {DropReason.STALE: 1}


def test_stale_insert_under_requeue_reissues_the_prompt() -> None:
    driver = Driver(settings(on_stale=OnStale.requeue)).ready()
    driver.claim()
    driver.claim()
    driver.store(2)
    driver.train(1, 0)
    driver.publish(1, "g/0#1")
    driver.store(2, (1, 1))
    driver.train(2, 1)

    assert [driver.insert(0), driver.insert(0)] == ["stale", "stale"]
    assert driver.core.stats(0.0).reissued == {ReissueReason.REQUEUED: 1}


def test_b057_exactly_max_staleness_is_not_stale() -> None:
    driver = Driver().ready()
    driver.claim()
    driver.store(2)
    driver.train(1, 0)

    assert driver.insert(0, 1, (1, 0)) == "stored"


def test_refused_frames_end_the_ticket_as_invalid() -> None:
    driver = Driver().ready()
    driver.claim()

    assert [driver.insert(0, invalid="NaN"), driver.insert(0)] == ["invalid", "invalid"]
    assert driver.core.stats(0.0).dropped == {DropReason.INVALID: 1}


def test_b053_a_full_buffer_blocks_and_never_drops() -> None:
    driver = Driver(settings(max_bytes=25)).ready()
    for _ in range(3):
        driver.claim()

    assert [driver.insert(0), driver.insert(1), driver.insert(2)] == ["stored", "stored", "full"]
    assert driver.credit(2) is None
    driver.train(1, 0)
    assert driver.credit(2).granted
    assert driver.insert(2) == "stored"


def test_reservation_keeps_room_until_the_insert() -> None:
    driver = Driver(settings(max_bytes=25)).ready()
    for _ in range(3):
        driver.claim()
    assert driver.credit(0).granted
    assert driver.credit(0).granted
    assert driver.credit(1).granted

    assert driver.insert(2) == "full"
    assert [driver.insert(0), driver.insert(1)] == ["stored", "stored"]


def test_group_above_the_limit_is_admitted_when_nothing_else_is_held() -> None:
    driver = Driver(settings(max_bytes=5)).ready()
    driver.claim()

    assert driver.credit(0).granted
    assert driver.insert(0) == "stored"


def test_limit_in_groups() -> None:
    driver = Driver(settings(max_groups=3)).ready()
    for _ in range(4):
        driver.claim()

    assert all(driver.credit(group_id).granted for group_id in range(3))
    assert driver.credit(3) is None


def test_lost_claim_gives_its_reservation_back() -> None:
    driver = Driver(settings(max_bytes=15)).ready()
    driver.claim()
    driver.credit(0)
    driver.join("g", "g#2")
    driver.generator_beat(engine(weights=WeightsName(1, 0)), peer="g#2")
    driver.claim("g#2")
    driver.claim("g#2")

    request = Credit(group_id=1, attempt=1, num_bytes=10, wait_s=1.0)
    assert driver.ask(request, "g#2") == CreditReply(granted=True)


def test_end_is_accepted_again_but_not_after_a_store() -> None:
    driver = Driver().ready()
    driver.claim()
    driver.claim()
    driver.insert(1)

    assert [driver.end(0).fenced, driver.end(0).fenced, driver.end(1).fenced] == [
        False,
        False,
        True,
    ]
    assert driver.core.stats(0.0).dropped == {DropReason.NO_SIGNAL: 1}


def test_b058_many_filtered_groups_do_not_stop_the_producers() -> None:
    driver = Driver().ready()
    for _ in range(100):
        ticket = driver.claim()
        assert ticket is not None
        driver.end(ticket.group_id)

    assert driver.core.stats(0.0).dropped == {DropReason.NO_SIGNAL: 100}


def test_message_about_a_forgotten_ticket_is_fenced() -> None:
    driver = Driver(settings(remembered_tickets=2)).ready()
    for _ in range(4):
        ticket = driver.claim()
        assert ticket is not None
        driver.end(ticket.group_id)

    assert driver.end(0).fenced
    assert driver.insert(1) == "fenced"
    assert not driver.end(3).fenced


@pytest.mark.parametrize("weights", [(1, 1), (2, 0)], ids=["a later version", "a later trainer"])
def test_a_group_of_weights_that_do_not_exist_yet_is_invalid(weights: tuple[int, int]) -> None:
    """Another run drives the engine: its version 40 is not ours, which we have yet to make."""
    driver = Driver().ready()
    driver.claim()

    assert driver.insert(0, 1, weights) == "invalid"
    assert driver.core.stats(0.0).dropped == {DropReason.INVALID: 1}
    (dropped,) = [record for record in driver.ledger if isinstance(record, Dropped)]
    name = WeightsName(*weights)
    assert dropped.detail == (
        f"it names weights {name}, which do not exist yet (newest announced: 1.0)"
    )
