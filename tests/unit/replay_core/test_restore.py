import msgspec
import pytest

from async_grpo.replay.core.core import ReplayCore
from async_grpo.replay.core.events import Joined
from async_grpo.replay.core.prompt_order import PromptOrder
from async_grpo.replay.core.records import Reissued, decode_record, encode_record
from async_grpo.replay.core.settings import CoreSettings
from async_grpo.replay_api.base import Error, ErrorCode, Ok
from async_grpo.replay_api.generator import Watch
from async_grpo.replay_api.peers import Leave
from async_grpo.replay_api.publishing import WaitCell
from async_grpo.replay_api.trainer import Fetch, Finish, Settle
from async_grpo.replay_parts import CellPhase, Role
from async_grpo.types import ReissueReason, WeightsName
from tests.unit.replay_core.driver import DATASET, Driver, engine, settings


def eventful() -> Driver:
    """A run in which every kind of record was written."""
    driver = Driver().ready()
    driver.store(2)
    driver.train(1, 0)
    driver.publish(1, "g/0#1")
    driver.store(3, (1, 1))
    driver.claim()
    driver.draw(2, 1)
    driver.trainer_beat()
    driver.draw(3, 1)
    return driver


def test_ledger_rebuilds_the_state_that_wrote_it() -> None:
    driver = eventful()
    state = ReplayCore(driver.settings).state

    for record in driver.ledger:
        state.evolve(decode_record(encode_record(record)))

    assert state == driver.core.state


def test_the_token_of_a_run_is_made_once_and_outlives_the_server() -> None:
    driver = Driver()
    assert driver.join().run_token == "run-77"
    driver.restart()
    welcome = driver.apply(Joined("g#2", Role.GENERATOR, "g", DATASET, "another-88")).reply
    assert welcome.run_token == "run-77"


def test_every_prefix_of_a_ledger_is_a_valid_state() -> None:
    driver = eventful()
    for length in range(len(driver.ledger)):
        core = ReplayCore.restore(driver.settings, driver.ledger[:length], 1.0)
        core.check_invariants()


def test_restart_reissues_stored_groups_and_keeps_leases_and_claims() -> None:
    driver = eventful()
    before = driver.core.stats(0.0)

    effects = driver.restart(1.0)

    stats = driver.core.stats(driver.now)
    assert before.stored == 1
    assert [type(record) for record in effects.records] == [Reissued]
    assert stats.reissued == {ReissueReason.LOST: 1}
    assert (stats.leased, stats.claimed, stats.waiting) == (2, 1, 1)
    assert stats.live == WeightsName(1, 1)


def test_claim_survives_a_restart_until_its_owner_stays_silent() -> None:
    driver = Driver().ready()
    driver.claim()
    driver.restart(100.0)
    assert driver.insert(0) == "stored"

    driver = Driver().ready()
    driver.claim()
    driver.restart(100.0)
    driver.tick(6.1)
    assert driver.core.stats(driver.now).waiting == 1


def test_leased_groups_can_be_acked_after_a_restart_but_not_fetched() -> None:
    driver = Driver().ready()
    driver.store(2)
    drawn = driver.draw(1, 0)
    driver.restart()

    assert driver.draw(1, 0) == drawn
    refused = driver.ask(Fetch(incarnation=1, group_id=0, attempt=1), "t#1")
    assert isinstance(refused, Error)
    assert refused.code is ErrorCode.NOT_FOUND
    assert isinstance(driver.ack(0, 1, [(0, 1), (1, 1)]), Ok)


def test_lease_released_after_a_restart_is_lost_not_stored() -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.draw(1, 0)
    driver.restart()
    driver.trainer_beat()

    stats = driver.core.stats(0.0)
    assert (stats.stored, stats.waiting) == (0, 2)
    assert stats.reissued == {ReissueReason.LOST: 2}


def test_trainer_counts_as_alive_after_a_restart() -> None:
    driver = Driver().ready()
    driver.restart(100.0)

    assert driver.start_trainer("t#2").code is ErrorCode.TRAINER_ALIVE


def test_unfinished_publish_is_over_after_a_restart_unless_the_engine_has_it() -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.train(1, 0)
    sequence = driver.announce(2, 1).publish_sequence
    driver.restart()
    driver.join()
    driver.generator_beat(engine(weights=WeightsName(1, 0)))
    watched = driver.core.empty_reply(Watch(seen=0, wait_s=1.0), "g#1")
    waited = driver.ask(
        WaitCell(
            incarnation=1,
            publish_sequence=sequence,
            cell_id=0,
            phase=CellPhase.BEGUN,
            wait_s=1.0,
        ),
        "t#1",
    )
    assert watched.orders == []  # type: ignore[union-attr] # a watch reply, or the test fails
    assert waited.phases == {"g/0#1": CellPhase.FAILED}  # type: ignore[union-attr] # see above
    assert driver.draw(2, 1).wishes == ["g/0#1"]

    driver.generator_beat(engine(weights=WeightsName(1, 1), publish_sequence=sequence))

    assert driver.core.live == WeightsName(1, 1)


def test_revisions_do_not_repeat_after_a_restart() -> None:
    driver = Driver().ready()
    seen = driver.core.empty_reply(Watch(seen=0, wait_s=1.0), "g#1").revision  # type: ignore[union-attr] # a watch reply
    driver.restart(2.0)
    driver.join()

    assert driver.ask(Watch(seen=seen, wait_s=1.0)) is not None


def test_fallback_reopens_tickets_that_were_forgotten() -> None:
    driver = Driver(settings(remembered_tickets=1)).ready()
    prompts = [ticket.prompt_index for _ in range(2) if (ticket := driver.claim())]
    driver.insert(0)
    driver.insert(1)
    driver.train(1, 0)
    driver.tick(6.1)
    driver.start_trainer("t#2")
    state = driver.core.state

    waiting = [state.book.tickets[group_id] for group_id in (0, 1)]

    assert [(ticket.attempt, ticket.prompt_index) for ticket in waiting] == [
        (2, prompts[0]),
        (2, prompts[1]),
    ]


def test_records_are_strict() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_record(b'{"type":"Finished","incarnation":1,"reason":"","more":1}')
    with pytest.raises(msgspec.DecodeError):
        decode_record(b'{"type":"Fini')


@pytest.mark.parametrize("num_prompts", [1, 2, 7, 64, 1000])
def test_prompt_order_is_a_permutation_of_each_epoch(num_prompts: int) -> None:
    order = PromptOrder(seed=3, num_prompts=num_prompts)
    epochs = [
        [order.prompt_index(epoch * num_prompts + n) for n in range(num_prompts)]
        for epoch in range(3)
    ]

    assert all(sorted(epoch) == list(range(num_prompts)) for epoch in epochs)
    if num_prompts >= 64:
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != list(range(num_prompts))
        other = PromptOrder(seed=4, num_prompts=num_prompts)
        assert [other.prompt_index(n) for n in range(num_prompts)] != epochs[0]


def test_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="num_prompts"):
        PromptOrder(seed=0, num_prompts=0)


def test_window_counts_whole_steps() -> None:
    assert settings(groups_per_step=3, pipeline_depth=2, max_groups=9).window == 9
    assert isinstance(settings(), CoreSettings)


def finished(num_train_steps: int) -> Driver:
    """A run of one step that is over, restored with `num_train_steps` configured."""
    driver = Driver(settings(num_train_steps=1)).ready()
    driver.store(2)
    driver.train(1, 0)
    driver.ask(Finish(incarnation=1, reason="all 1 train steps are done"), "t#1")
    driver.settings = settings(num_train_steps=num_train_steps)
    driver.restart(10.0)
    return driver


def test_a_finished_run_is_still_over_after_a_restart() -> None:
    driver = finished(num_train_steps=1)
    driver.join(instance="g#1")

    assert driver.core.over == "all 1 train steps are done"
    assert driver.ask(Watch(seen=0, wait_s=1.0), "g#1").stop == "all 1 train steps are done"


def test_a_finished_run_that_got_more_steps_waits_for_a_trainer_and_goes_on() -> None:
    driver = finished(num_train_steps=2)
    driver.join(instance="g#1")
    assert driver.core.over == ""
    assert driver.ask(Watch(seen=0, wait_s=1.0), "g#1").stop == ""

    driver.tick(10.0)  # the trainer before is silent
    driver.join(instance="g#1")
    assert driver.start_trainer("t#2", restored_version=1, restored_incarnation=1).incarnation == 2
    driver.incarnation = 2
    driver.generator_beat(engine(), peer="g#1")
    driver.publish(1, "g/0#1")
    assert driver.claim("g#1") is not None
    driver.ask(Finish(incarnation=2, reason="enough"), "t#2")
    assert driver.core.over == "enough"


def test_settled_steps_are_forgotten_and_can_no_longer_be_undone() -> None:
    driver = Driver(settings(num_train_steps=4)).ready()
    for version in range(3):
        driver.store(2, (1, version))
        driver.train(version + 1, version)
        driver.publish(version + 1, "g/0#1")
    assert driver.ask(Settle(incarnation=1, policy_version=2), "t#1") == Ok()
    assert driver.ask(Settle(incarnation=1, policy_version=1), "t#1") == Ok()  # late: no change
    assert list(driver.core.state.versions.steps) == [2]
    assert driver.core.stats(0.0).trained == 6

    driver.ask(Leave(), "t#1")
    for version in (0, 1):
        refused = driver.start_trainer("t#2", version, min(version, 1))
        assert refused.code is ErrorCode.NOT_FOUND
        assert "steps before 2 are final" in refused.message
    assert driver.start_trainer("t#2", 2, 1).incarnation == 2
    driver.restart()
    assert driver.core.stats(0.0).trained == 4


def test_settling_steps_that_were_never_acked_is_refused() -> None:
    driver = Driver().ready()
    assert driver.ask(Settle(incarnation=1, policy_version=1), "t#1").code is ErrorCode.BAD_REQUEST


def test_a_checkpoint_that_a_later_trainer_fell_back_behind_is_refused() -> None:
    driver = Driver().ready()
    for version in range(2):
        driver.store(2, (1, version))
        driver.train(version + 1, version)
        driver.publish(version + 1, "g/0#1")
    driver.ask(Leave(), "t#1")
    assert driver.start_trainer("t#2", 1, 1).incarnation == 2
    driver.incarnation = 2
    driver.generator_beat(engine())
    driver.publish(1, "g/0#1")
    driver.store(2, (2, 1))
    groups = driver.draw(3, 1, peer="t#2").groups
    driver.ack(1, 3, [(g.group_id, g.attempt) for g in groups], peer="t#2")
    driver.ask(Leave(), "t#2")

    refused = driver.start_trainer("t#3", 2, 1)  # 1.2 was undone; 2.2 took its place
    assert refused.code is ErrorCode.NOT_FOUND
    assert "fallen back" in refused.message
    assert driver.start_trainer("t#3", 2, 3).code is ErrorCode.NOT_FOUND
    assert driver.start_trainer("t#3", 2).code is ErrorCode.NOT_FOUND
    assert driver.start_trainer("t#3", 2, 2).incarnation == 3
