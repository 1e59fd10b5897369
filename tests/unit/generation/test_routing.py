import asyncio

import pytest

from async_grpo.engine_api import ServerInfo
from async_grpo.generation.activity import Activity
from async_grpo.generation.engines import Engine, UpdateKind
from async_grpo.generation.names import GivenNames, Holder
from async_grpo.generation.routing import Placement, Router
from async_grpo.replay_parts import EngineState
from async_grpo.types import WeightsName

V0, V1 = WeightsName(1, 0), WeightsName(1, 1)

NAMES = GivenNames(Holder("run", "gen/0"))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Fleet:
    def __init__(self, *slots):
        self.clock = Clock()
        self.engines = []
        self.router = Router(lambda: self.engines, on_change=lambda: None, clock=self.clock)
        for index, count in enumerate(slots):
            info = ServerInfo(version="fake", max_running_requests=count + 1)
            engine = Engine(f"e{index}", None, info, self.router.dispatch, NAMES)
            self.engines.append(engine)
            engine.commit(V0, 1, "sum", UpdateKind.FILES)

    def group(self, size):
        placement = Placement()
        return [self.router.enqueue(placement) for _ in range(size)]


async def entered(place):
    async with asyncio.timeout(1):
        return await place.__aenter__()


async def test_a_group_shares_an_engine_and_the_next_takes_the_other():
    fleet = Fleet(4, 4)
    first = [await entered(place) for place in fleet.group(3)]
    second = [await entered(place) for place in fleet.group(3)]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] is not second[0]


async def test_a_group_overflows_to_another_engine_and_then_queues():
    fleet = Fleet(2, 2)
    places = fleet.group(5)
    engines = [await entered(place) for place in places[:4]]
    assert engines.count(fleet.engines[0]) == engines.count(fleet.engines[1]) == 2
    assert places[4].waiting
    assert not fleet.router._room.is_set()
    places[0].leave()
    assert await entered(places[4]) is engines[0]


async def test_room_means_a_free_slot_that_nobody_waits_for():
    fleet = Fleet(2)
    room = fleet.router._room
    assert room.is_set()
    places = fleet.group(3)
    assert not room.is_set()
    places[0].leave()
    assert not room.is_set(), "the third took it"
    places[1].leave()
    assert room.is_set()
    places[1].leave()
    assert fleet.router.num_running == 1


async def test_no_request_goes_to_an_engine_under_update():
    fleet = Fleet(1, 1)
    fleet.engines[0].begin_update(V1)
    places = fleet.group(2)
    assert await entered(places[0]) is fleet.engines[1]
    assert places[1].waiting
    fleet.engines[0].commit(V1, 2, "sum", UpdateKind.FILES)
    assert await entered(places[1]) is fleet.engines[0]


async def test_a_second_try_goes_first():
    fleet = Fleet(1)
    places = fleet.group(2)
    again = fleet.router.enqueue(Placement(), first=True)
    places[0].leave()
    assert not again.waiting
    assert places[1].waiting


async def test_a_cancelled_wait_leaves_the_queue_and_keeps_no_slot():
    fleet = Fleet(1)
    taken, waiting, last = fleet.group(3)
    task = asyncio.create_task(waiting.__aenter__())
    await asyncio.sleep(0)
    # the slot is handed over in the same moment in which the wait is cancelled
    taken.leave()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await entered(last) is fleet.engines[0]
    assert fleet.router.num_running == 1


async def test_utilization_is_the_share_of_slot_seconds():
    fleet = Fleet(4)
    fleet.router.utilization()
    places = fleet.group(2)
    fleet.clock.now = 3.0
    places[0].leave()
    places[1].leave()
    fleet.clock.now = 6.0
    assert fleet.router.utilization() == pytest.approx(0.25)
    assert fleet.router.utilization() == 0.0


async def test_an_engine_is_on_probation_from_the_begin_of_an_update_to_its_probe():
    (engine,) = Fleet(2).engines
    assert await engine.cleared()
    engine.begin_update(V1)
    held = asyncio.create_task(engine.cleared())
    await asyncio.sleep(0)
    assert not held.done()
    engine.commit(V1, 2, "sum", UpdateKind.FILES)
    assert await held
    assert engine.status.weights == V1
    engine.begin_update(V1)
    held = asyncio.create_task(engine.cleared())
    await asyncio.sleep(0)
    engine.condemn("the probe failed")
    assert not await held
    assert not engine.serving


async def test_the_end_of_an_engine_is_final():
    (engine,) = Fleet(2).engines
    engine.condemn("first reason")
    engine.condemn("second reason")
    engine.begin_update(V1)
    engine.commit(V1, 2, "sum", UpdateKind.FILES)
    assert engine.status.state is EngineState.QUARANTINED
    assert not engine.status.wants_sync
    assert await engine.condemned() == "first reason"


async def test_activity_is_in_exactly_one_state():
    fleet = Fleet(1)
    clock, (engine,) = fleet.clock, fleet.engines
    inserting = 0
    engines = []
    activity = Activity(lambda: engines, lambda: inserting, clock)
    seen = []

    def at(now):
        clock.now = now
        activity.update()
        seen.append(activity.state)

    at(1)
    engines.append(engine)
    at(2)
    (place,) = fleet.group(1)
    at(3)
    engine.begin_update(V1)
    at(4)
    engine.commit(V1, 2, "sum", UpdateKind.FILES)
    at(5)
    place.leave()
    inserting = 1
    at(6)
    inserting = 0
    at(7)
    assert seen == [
        "starting", "waiting", "generating", "syncing", "generating", "blocked", "waiting",
    ]  # fmt: skip
    clock.now = 10
    assert activity.seconds() == {
        "starting": 2, "waiting": 1 + 3, "generating": 1 + 1, "syncing": 1, "blocked": 1,
    }  # fmt: skip
