"""Another pipeline_depth while the run goes on."""

import pytest

from async_grpo.replay.core.records import DepthSet
from async_grpo.replay_api.base import ErrorCode, Ok
from async_grpo.replay_api.trainer import SetDepth
from async_grpo.types import DropReason, ReissueReason
from tests.unit.replay_core.driver import Driver, settings

WIDE = {"max_staleness": 4, "min_depth": 0, "max_depth": 3, "max_groups": 10, "num_train_steps": 9}


def set_depth(driver: Driver, depth: int, peer: str = "t#1", incarnation: int = 1):
    return driver.ask(SetDepth(incarnation=incarnation, depth=depth, reason="because"), peer)


def claim_all(driver: Driver) -> int:
    number = 0
    while driver.claim() is not None:
        number += 1
    return number


def test_a_larger_depth_admits_more_at_once() -> None:
    driver = Driver(settings(**WIDE)).ready()
    assert claim_all(driver) == 2 * 2
    assert set_depth(driver, 3) == Ok()
    assert claim_all(driver) == 2 * 2
    assert driver.core.stats(0.0).pipeline_depth == 3


def test_a_smaller_depth_admits_nothing_until_groups_are_trained_and_live() -> None:
    driver = Driver(settings(**WIDE)).ready()
    driver.store(4)
    set_depth(driver, 0)
    assert driver.claim() is None
    driver.train(1, 0)
    driver.publish(1, "g/0#1")
    assert driver.claim() is None  # two are stored yet
    driver.train(2, 1)
    driver.publish(2, "g/0#1")
    assert claim_all(driver) == 2


def test_the_depth_in_force_is_no_record_and_others_survive_a_restart() -> None:
    driver = Driver(settings(**WIDE)).ready()
    for depth in (1, 2, 2):
        assert set_depth(driver, depth) == Ok()
    written = [record for record in driver.ledger if isinstance(record, DepthSet)]
    assert written == [DepthSet(incarnation=1, depth=2, reason="because")]
    driver.restart()
    assert driver.core.state.pipeline_depth == 2
    driver.tick(100.0)  # the trainer is lost
    reply = driver.start_trainer("t#2")
    assert (reply.incarnation, reply.pipeline_depth) == (2, 2)


@pytest.mark.parametrize("depth", [-1, 0, 4])
def test_a_depth_out_of_bounds_is_refused(depth: int) -> None:
    driver = Driver(settings(**{**WIDE, "min_depth": 1})).ready()
    reply = set_depth(driver, depth)
    assert reply.code is ErrorCode.BAD_REQUEST
    assert f"pipeline_depth {depth} is not within 1 to 3" in reply.message
    assert driver.core.state.pipeline_depth == 1


def test_without_a_controller_it_may_only_shrink() -> None:
    driver = Driver().ready()
    assert set_depth(driver, 2).code is ErrorCode.BAD_REQUEST
    assert set_depth(driver, 0) == Ok()


def test_only_the_runs_trainer_sets_it() -> None:
    driver = Driver(settings(**WIDE)).ready()
    assert set_depth(driver, 2, incarnation=2).code is ErrorCode.BAD_REQUEST
    driver.tick(100.0)
    driver.start_trainer("t#2")
    assert set_depth(driver, 2, "t#2", incarnation=1).code is ErrorCode.FENCED
    assert set_depth(driver, 2, "g#1").code is not None


def test_what_was_dropped_is_told_with_its_reward_and_length() -> None:
    driver = Driver(settings(**WIDE)).ready()
    driver.store(1)
    group = driver.claim()
    driver.insert(group.group_id, invalid="bad")
    lost = driver.store(1)[0]
    driver.restart()  # what was stored is reissued
    driver.join()
    driver.generator_beat()
    state = driver.core.state.accounting.recent
    assert state.dropped_completions == {DropReason.INVALID: 0}  # its figures are not trusted
    assert state.dropped_rewards == {DropReason.INVALID: 0.0}
    assert state.reissued_tokens == {ReissueReason.LOST: 10}
    assert driver.core.state.book.get(lost).attempt == 2
