"""What becomes of old tokens: mask_tokens, forced staleness, weights by length."""

from typing import Any

import pytest

from async_grpo.config.staleness import OnStale, OverAge
from async_grpo.replay.core.keeping import KeptByLength, length_bin
from async_grpo.replay_api.generator import Insert
from async_grpo.replay_parts import EndStats, GroupSummary
from async_grpo.types import DropReason, ReissueReason, WeightsName
from tests.unit.replay_core.driver import Driver, settings


def masking(**changes: Any) -> Driver:
    """S = 1, D = 1, one group per step, under mask_tokens; half of a group must be fresh."""
    values = {"groups_per_step": 1, "over_age": OverAge.mask_tokens, "num_train_steps": 9}
    return Driver(settings(**{**values, **changes})).ready()


def at_version_two(driver: Driver) -> None:
    """Two steps trained and live; the next step must use no token of version 0."""
    for version in range(2):
        driver.store(1, (1, version))
        driver.train(version + 1, version)
        driver.publish(version + 1, "g/0#1")


def test_mask_tokens_hands_out_a_group_whose_first_tokens_are_too_old() -> None:
    driver = masking()
    at_version_two(driver)
    driver.store(1, (1, 0), (1, 1))

    (group,) = driver.draw(3, 2).groups

    assert group.oldest == WeightsName(1, 0)


def test_reject_does_not() -> None:
    driver = masking(over_age=OverAge.reject)
    at_version_two(driver)
    ticket = driver.claim()
    assert ticket is not None

    assert driver.insert(ticket.group_id, 1, (1, 0), (1, 1)) == "stale"


def test_too_few_fresh_tokens_end_a_group_as_stale_at_the_draw() -> None:
    driver = masking()
    at_version_two(driver)
    (few,) = driver.store(1, (1, 0), (1, 0), (1, 1))  # 5 of 15

    assert driver.draw(3, 2) is None
    assert driver.core.stats(0.0).dropped == {DropReason.STALE: 1}
    (record,) = [r for r in driver.ledger if type(r).__name__ == "Dropped"]
    assert (record.group_id, record.detail) == (few, "5 of 15 tokens are within 1 steps")


def test_under_mask_tokens_an_insert_is_never_stale() -> None:
    driver = masking()
    at_version_two(driver)
    driver.store(1, (1, 0))

    assert driver.draw(3, 2) is None
    assert driver.core.stats(0.0).dropped == {DropReason.STALE: 1}


def forced(k: int, **changes: Any) -> Driver:
    """Two groups per step, trained at staleness k."""
    values = {"pipeline_depth": k, "max_staleness": k, "num_train_steps": 12, "max_groups": 99}
    return Driver(settings(forced=True, **{**values, **changes})).ready()


@pytest.mark.parametrize("k", [0, 1, 3])
def test_forced_staleness_is_k_after_the_first_k_steps(k: int) -> None:
    driver = forced(k)
    driver.store(2 * k + 2)
    ages = []
    for version in range(6):
        drawn = driver.draw(version + 1, version).groups
        ages.append({version - group.oldest.policy_version for group in drawn})
        driver.ack(version, version + 1, [(g.group_id, g.attempt) for g in drawn])
        driver.publish(version + 1, "g/0#1")
        driver.store(2, (1, version + 1))

    assert ages == [{min(version, k)} for version in range(6)]


def test_forced_step_waits_until_all_of_its_version_is_stored() -> None:
    driver = forced(1)
    driver.store(3)
    assert driver.draw(1, 0) is None  # one more may be claimed
    ticket = driver.claim()
    assert ticket is not None
    assert driver.draw(1, 0) is None  # it is in flight
    driver.insert(ticket.group_id)

    assert len(driver.draw(1, 0).groups) == 2


def test_forced_step_is_not_drawn_ahead() -> None:
    driver = forced(1)
    driver.store(4)
    driver.train(1, 0)

    assert driver.draw(2, 1) is None  # version 1 is not live, its groups are not sampled
    driver.publish(1, "g/0#1")
    driver.store(2, (1, 1))
    assert len(driver.draw(2, 1).groups) == 2


def test_forced_staleness_refuses_what_an_engine_that_missed_an_update_sampled() -> None:
    driver = forced(1)
    driver.store(4)
    driver.train(1, 0)
    driver.publish(1, "g/0#1")
    late, mixed = driver.claim(), driver.claim()
    assert late is not None
    assert mixed is not None

    assert driver.insert(late.group_id, 1, (1, 0)) == "stale"
    assert driver.insert(mixed.group_id, 1, (1, 0), (1, 1)) == "stale"


def summary(num_tokens: int) -> GroupSummary:
    """One group of two completions."""
    return GroupSummary(
        group_id=0, attempt=1, num_bytes=1, num_completions=2, num_tokens=num_tokens,
        reward_sum=0.0, weights_tokens=[(WeightsName(1, 0), num_tokens)],
    )  # fmt: skip


def test_weight_is_the_inverse_of_the_share_that_was_kept() -> None:
    kept = KeptByLength()
    kept.trained[length_bin(summary(20))] = 6
    kept.stale[length_bin(summary(20))] = 2
    kept.stale[length_bin(summary(2000))] = 1

    assert kept.weight(summary(20), 3.0) == 8 / 6
    assert kept.weight(summary(20), 1.1) == 1.1
    assert kept.weight(summary(2000), 3.0) == 3.0
    assert kept.weight(summary(200), 3.0) == 1.0


def test_length_bins_are_half_octaves_of_the_mean_completion() -> None:
    assert [length_bin(summary(n)) for n in (0, 2, 4, 6, 8)] == [0, 0, 2, 3, 4]
    assert length_bin(EndStats(num_completions=4, num_tokens=16)) == 4


@pytest.mark.parametrize("on_stale", [OnStale.drop, OnStale.requeue])
def test_a_trained_group_stands_for_the_stale_ones_of_its_length(on_stale: OnStale) -> None:
    driver = masking(over_age=OverAge.reject, on_stale=on_stale, keep_weight_cap=9.0)
    first = driver.core.stats(0.0)
    at_version_two(driver)  # two groups of that length are trained
    ticket = driver.claim()
    assert ticket is not None
    assert driver.insert(ticket.group_id, 1, (1, 0)) == "stale"
    (_,) = driver.store(1, (1, 2))

    (group,) = driver.draw(3, 2).groups

    assert first.trained == 0
    assert group.keep_weight == 3 / 2
    driver.restart()
    assert driver.draw(3, 2).groups == [group]


def test_without_a_cap_every_group_weighs_one() -> None:
    driver = masking(over_age=OverAge.reject)
    at_version_two(driver)
    ticket = driver.claim()
    assert ticket is not None
    driver.insert(ticket.group_id, 1, (1, 0))
    driver.store(1, (1, 2))

    (group,) = driver.draw(3, 2).groups

    assert group.keep_weight == 1.0


def test_tokens_of_a_requeued_group_count_as_generated() -> None:
    driver = masking(over_age=OverAge.reject, on_stale=OnStale.requeue)
    at_version_two(driver)
    ticket = driver.claim()
    assert ticket is not None
    summary_of = GroupSummary(
        group_id=ticket.group_id, attempt=1, num_bytes=1, num_completions=2, num_tokens=40,
        reward_sum=1.0, weights_tokens=[(WeightsName(1, 0), 40)],
    )  # fmt: skip
    reply: Any = driver.ask(Insert(group_id=ticket.group_id, attempt=1, summary=summary_of))
    assert reply.outcome == "stale"
    driver.store(1, (1, 2))

    generated = driver.draw(3, 2).generated

    assert driver.core.stats(0.0).reissued == {ReissueReason.REQUEUED: 1}
    assert (generated.num_groups, generated.num_tokens) == (2, 45)
