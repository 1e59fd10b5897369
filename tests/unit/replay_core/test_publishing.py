from typing import Any

from async_grpo.replay_api.generator import Watch
from async_grpo.replay_api.publishing import AbortCell, WaitCell, WaitCellReply
from async_grpo.replay_parts import CellPhase, EngineState
from async_grpo.types import WeightsName
from tests.unit.replay_core.driver import Driver, engine, settings

BEGUN, COMMITTED, FAILED = CellPhase.BEGUN, CellPhase.COMMITTED, CellPhase.FAILED


def two_engines(**changes: Any) -> Driver:
    driver = Driver(settings(**changes))
    driver.join()
    driver.start_trainer()
    driver.generator_beat(engine(engine_id="g/0#1", tp_size=2), engine(engine_id="g/1#1"))
    return driver


def orders(driver: Driver) -> Any:
    reply: Any = driver.ask(Watch(seen=-1, wait_s=1.0))
    return reply.orders


def wait(driver: Driver, sequence: int, phase: CellPhase, cell_id: int = 0) -> Any:
    return driver.ask(
        WaitCell(
            incarnation=1, publish_sequence=sequence, cell_id=cell_id, phase=phase, wait_s=1.0
        ),
        "t#1",
    )


def test_cells_are_frozen_with_ranks_after_the_trainer() -> None:
    driver = two_engines(engines_per_cell=2)

    cell = driver.announce(1, 0).cells[0]

    assert [(e.engine_id, e.tp_size, e.rank_offset) for e in cell.engines] == [
        ("g/0#1", 2, 1),
        ("g/1#1", 1, 3),
    ]


def test_wished_engines_form_cells_of_their_own() -> None:
    driver = two_engines(engines_per_cell=2)

    assert len(driver.announce(1, 0, wished_only=True).cells) == 2


def test_starting_dead_and_quarantined_engines_are_left_out() -> None:
    driver = Driver(settings())
    driver.join()
    driver.start_trainer()
    states = [EngineState.STARTING, EngineState.DEAD, EngineState.QUARANTINED, EngineState.PAUSED]
    driver.generator_beat(
        *(
            engine(engine_id=f"g/{number}#1", state=state, wants_sync=False)
            for number, state in enumerate(states)
        ),
        engine(engine_id="g/9#1", state=EngineState.QUARANTINED, wants_sync=True),
    )

    cells = driver.announce(1, 0).cells

    assert [cell.engines[0].engine_id for cell in cells] == ["g/3#1", "g/9#1"]


def test_go_needs_all_engines_and_the_trainer() -> None:
    driver = two_engines(engines_per_cell=2)
    sequence = driver.announce(1, 0).publish_sequence
    assert orders(driver)[0].engine_ids == ["g/0#1", "g/1#1"]
    assert orders(driver)[0].ranks == [1, 3]
    driver.phase(sequence, "g/0#1", BEGUN)
    driver.open_cell(sequence)
    assert not orders(driver)[0].go
    assert wait(driver, sequence, BEGUN) is None

    driver.phase(sequence, "g/1#1", BEGUN)

    assert orders(driver)[0].go
    assert isinstance(wait(driver, sequence, BEGUN), WaitCellReply)


def test_go_stays_while_one_engine_fails_and_another_finishes() -> None:
    driver = two_engines(engines_per_cell=2)
    sequence = driver.announce(1, 0).publish_sequence
    driver.open_cell(sequence)
    driver.phase(sequence, "g/0#1", BEGUN)
    driver.phase(sequence, "g/1#1", BEGUN)
    driver.phase(sequence, "g/0#1", FAILED)
    assert [order.engine_ids for order in orders(driver)] == [["g/1#1"]]
    assert orders(driver)[0].go
    assert driver.core.live is None

    driver.phase(sequence, "g/1#1", COMMITTED)

    assert driver.core.live == WeightsName(1, 0)
    assert orders(driver) == []


def test_failure_before_go_never_says_go() -> None:
    driver = two_engines(engines_per_cell=2)
    sequence = driver.announce(1, 0).publish_sequence
    driver.open_cell(sequence)
    driver.phase(sequence, "g/0#1", FAILED)
    driver.phase(sequence, "g/1#1", BEGUN)

    assert not orders(driver)[0].go
    assert wait(driver, sequence, BEGUN).phases == {"g/0#1": FAILED, "g/1#1": BEGUN}


def test_abort_is_shown_until_the_engine_reports() -> None:
    driver = two_engines(engines_per_cell=2)
    sequence = driver.announce(1, 0).publish_sequence
    driver.ask(
        AbortCell(incarnation=1, publish_sequence=sequence, cell_id=0, reason="no rank"), "t#1"
    )
    assert orders(driver)[0].aborted == "no rank"
    assert set(wait(driver, sequence, COMMITTED).phases.values()) == {FAILED}

    driver.phase(sequence, "g/0#1", FAILED)
    driver.phase(sequence, "g/1#1", FAILED)

    assert orders(driver) == []
    assert driver.core.live is None


def test_vanished_engine_fails_and_the_rest_goes_live() -> None:
    driver = two_engines()
    sequence = driver.announce(1, 0).publish_sequence
    driver.phase(sequence, "g/1#1", COMMITTED, cell_id=1)
    assert driver.core.live is None

    driver.generator_beat(engine(engine_id="g/1#1", weights=WeightsName(1, 0)))

    assert driver.core.live == WeightsName(1, 0)


def test_lost_generator_fails_its_engines() -> None:
    driver = two_engines()
    driver.join("h")
    driver.generator_beat(engine("h"), peer="h#1")
    sequence = driver.announce(1, 0).publish_sequence
    driver.phase(sequence, "h/0#1", COMMITTED, cell_id=2, peer="h#1")
    driver.now = 5.0
    driver.generator_beat(engine("h", WeightsName(1, 0)), peer="h#1")
    driver.tick(1.5)

    assert driver.core.live == WeightsName(1, 0)


def test_commit_is_also_read_from_the_heartbeat() -> None:
    driver = Driver()
    driver.join()
    driver.start_trainer()
    driver.generator_beat(engine())
    sequence = driver.announce(1, 0).publish_sequence

    driver.generator_beat(engine(weights=WeightsName(1, 0), publish_sequence=sequence))

    assert driver.core.live == WeightsName(1, 0)


def test_heartbeat_sent_before_a_commit_does_not_take_it_back() -> None:
    driver = Driver().ready()
    driver.store(2)
    driver.train(1, 0)
    driver.publish(1, "g/0#1")

    driver.generator_beat(engine(weights=WeightsName(1, 0), publish_sequence=1))

    assert driver.claim() is not None


def test_announce_is_idempotent_and_takes_one_sequence() -> None:
    driver = two_engines()
    first = driver.announce(1, 0)

    assert driver.announce(1, 0) == first
    assert driver.announce(2, 0).publish_sequence == first.publish_sequence + 1
    assert type(driver.announce(1, 0)).__name__ == "Error"


def test_newer_announce_ends_an_unfinished_one() -> None:
    driver = two_engines()
    first = driver.announce(1, 0).publish_sequence
    driver.phase(first, "g/0#1", COMMITTED)
    second = driver.announce(2, 0).publish_sequence

    assert driver.core.live == WeightsName(1, 0)
    shown = {(order.publish_sequence, tuple(order.engine_ids)) for order in orders(driver)}
    assert (first, ("g/1#1",)) in shown
    assert (second, ("g/1#1",)) in shown
    aborted = [order.aborted for order in orders(driver) if order.publish_sequence == first]
    assert aborted == [f"superseded by publish {second}"]


def test_publish_to_nobody_takes_a_sequence_and_is_not_live() -> None:
    driver = Driver()
    driver.join()
    driver.start_trainer()

    reply = driver.announce(1, 0)

    assert (reply.publish_sequence, reply.cells) == (1, [])
    assert driver.core.live is None


def test_watch_waits_until_something_of_its_own_changes() -> None:
    driver = two_engines()
    driver.join("h")
    driver.generator_beat(engine("h"), peer="h#1")
    driver.announce(1, 0)
    seen: Any = driver.ask(Watch(seen=0, wait_s=1.0))
    assert driver.ask(Watch(seen=seen.revision, wait_s=1.0)) is None
    driver.phase(1, "h/0#1", BEGUN, cell_id=2, peer="h#1")
    assert driver.ask(Watch(seen=seen.revision, wait_s=1.0)) is None
    driver.phase(1, "g/0#1", BEGUN)
    assert driver.ask(Watch(seen=seen.revision, wait_s=1.0)) is not None


def test_overdue_watch_is_told_the_present_state() -> None:
    driver = two_engines()
    driver.announce(1, 0)
    seen: Any = driver.ask(Watch(seen=0, wait_s=1.0))

    reply: Any = driver.core.empty_reply(Watch(seen=seen.revision, wait_s=1.0), "g#1")

    assert reply == seen


def test_weights_that_an_earlier_publish_brought_go_live_when_the_newer_one_is_lost() -> None:
    """Found by simulation (seed 57216): nothing was live, and no engine wished."""
    driver = Driver()
    driver.join()
    driver.start_trainer()
    driver.generator_beat(engine())
    first = driver.announce(1, 0).publish_sequence
    driver.announce(2, 0)
    driver.restart()
    driver.join()
    assert driver.core.live is None

    driver.generator_beat(engine(weights=WeightsName(1, 0), publish_sequence=first))

    assert driver.core.live == WeightsName(1, 0)
    assert driver.claim() is not None
