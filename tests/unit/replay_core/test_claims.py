from async_grpo.replay_api.base import Error, ErrorCode
from async_grpo.replay_api.generator import Claim, ClaimReply, Watch
from async_grpo.replay_api.peers import Leave
from async_grpo.replay_parts import Dataset
from async_grpo.types import DropReason, ReissueReason, WeightsName
from tests.unit.replay_core.driver import Driver, engine, settings


def test_nothing_is_handed_out_before_weights_are_live() -> None:
    driver = Driver()
    driver.join()
    driver.start_trainer()
    driver.generator_beat(engine())

    assert driver.claim() is None


def test_window_bounds_what_is_under_way() -> None:
    driver = Driver().ready()

    tickets = [driver.claim() for _ in range(5)]

    assert [ticket.group_id for ticket in tickets if ticket] == [0, 1, 2, 3]


def test_trained_but_not_live_counts_until_it_is_published() -> None:
    driver = Driver().ready()
    driver.store(4)
    driver.train(1, 0)

    assert driver.claim() is None
    driver.publish(1, "g/0#1")
    assert driver.claim() is not None


def test_no_more_groups_than_steps_left_need() -> None:
    driver = Driver(settings(num_train_steps=1)).ready()

    assert [driver.claim() is not None for _ in range(3)] == [True, True, False]


def test_repeated_claim_gets_the_same_ticket_and_an_earlier_one_none() -> None:
    driver = Driver().ready()
    first, second = driver.claim(), driver.claim()

    assert driver.ask(Claim(number=2, wait_s=1.0)) == ClaimReply(ticket=second)
    assert driver.ask(Claim(number=1, wait_s=1.0)) == ClaimReply()
    assert first is not None
    assert driver.core.stats(0.0).claimed == 2


def test_repeated_claim_survives_a_restart_of_the_server() -> None:
    driver = Driver().ready()
    ticket = driver.claim()
    driver.restart()

    assert driver.ask(Claim(number=1, wait_s=1.0)) == ClaimReply(ticket=ticket)


def test_engine_behind_the_live_weights_gets_nothing() -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.train(1, 0)
    driver.publish(1, "g/0#1")
    driver.join("h")
    driver.generator_beat(engine("h", WeightsName(1, 0)), peer="h#1")

    assert driver.claim("h#1") is None
    assert driver.claim("g#1") is not None


def test_lost_claims_are_reissued_then_end_the_ticket() -> None:
    driver = Driver().ready()
    for attempt in (1, 2, 3):
        ticket = driver.claim()
        assert ticket is not None
        assert (ticket.group_id, ticket.attempt) == (0, attempt)
        driver.generator_beat(engine(weights=WeightsName(1, 0)))
        for _ in range(12):
            driver.tick(5.1)
            driver.generator_beat(engine(weights=WeightsName(1, 0)))
    stats = driver.core.stats(driver.now)

    assert stats.reissued == {ReissueReason.CLAIM_LOST: 2}
    assert stats.dropped == {DropReason.GENERATION_FAILED: 1}


def test_credit_ends_the_group_deadline() -> None:
    driver = Driver().ready()
    driver.claim()
    assert driver.credit(0).granted
    for _ in range(20):
        driver.tick(5.0)
        driver.generator_beat(engine(weights=WeightsName(1, 0)))

    assert driver.insert(0) == "stored"


def test_silent_generator_loses_its_claims_and_must_say_hello() -> None:
    driver = Driver().ready()
    driver.claim()
    driver.tick(6.1)

    assert driver.core.stats(driver.now).waiting == 1
    reply = driver.ask(Claim(number=2, wait_s=1.0))
    assert isinstance(reply, Error)
    assert reply.code is ErrorCode.HELLO_REQUIRED


def test_new_instance_or_goodbye_gives_claims_back_at_once() -> None:
    driver = Driver().ready()
    driver.claim()
    driver.join("g", "g#2")
    assert driver.core.stats(0.0).waiting == 1

    driver.generator_beat(engine(weights=WeightsName(1, 0)), peer="g#2")
    assert driver.claim("g#2") is not None
    driver.ask(Leave(), "g#2")
    assert driver.core.stats(0.0).waiting == 1


def test_other_dataset_is_refused() -> None:
    driver = Driver().ready()

    reply = driver.join("h", dataset=Dataset(fingerprint="other", num_prompts=5))

    assert reply.code is ErrorCode.CONFIG_MISMATCH


def test_watch_names_claims_that_are_over() -> None:
    driver = Driver(settings(group_timeout_s=5.0)).ready()
    driver.claim()
    driver.generator_beat(engine(weights=WeightsName(1, 0)), claims=[(0, 1)])
    driver.tick(5.5)

    reply = driver.ask(Watch(seen=0, wait_s=1.0))

    assert reply is not None
    assert reply.cancel == [(0, 1)]  # type: ignore[union-attr] # a watch reply, or the test fails


def test_prompts_follow_the_seeded_order_one_epoch_after_the_other() -> None:
    driver = Driver(settings(groups_per_step=5, max_groups=30)).ready()
    tickets = [driver.claim() for _ in range(10)]
    prompts = [ticket.prompt_index for ticket in tickets if ticket]

    assert sorted(prompts[:5]) == sorted(prompts[5:]) == [0, 1, 2, 3, 4]
