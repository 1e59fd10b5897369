"""Who drives a server: two slots, one fake engine, no clock to wait for but the answer's."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from async_grpo.engine_api import Path as Route
from async_grpo.errors import GenerationError
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.engines import Engine, UpdateKind
from async_grpo.generation.handshake import NotAnEngine, shake_hands
from async_grpo.generation.holding import EngineInUse, let_go, require_free, watch_name
from async_grpo.generation.names import Holder, ServedName
from async_grpo.types import WeightsName
from tests.fakes.fake_engine import FakeEngine

X, Y = Holder("x-1", "gen/0"), Holder("y-2", "gen/0")
V7 = WeightsName(1, 7)
LOOK_S = 0.01


@asynccontextmanager
async def client_of(server):
    client = HttpEngineClient(server.url, control_timeout_s=2.0, vocab_size=64)
    try:
        yield client
    finally:
        await client.close()


async def attach(client, me, answer_s=0.05):
    return await shake_hands(
        client, me=me, attached=True, left_group="", timeout_s=2.0, answer_s=answer_s
    )


@asynccontextmanager
async def driven(server, me=X, weights=V7):
    """An engine that slot `me` drives and looks at; yields it and its watch."""
    async with client_of(server) as client:
        greeted = await attach(client, me)
        engine = Engine("e", client, greeted.info, lambda: None, greeted.names)
        if weights is not None:
            engine.begin_update(weights)
            server.weight_version = engine.names.served(weights)
            engine.commit(weights, 1, "sum", UpdateKind.FILES)
        watch = asyncio.create_task(watch_name(engine, LOOK_S))
        try:
            yield engine, watch
        finally:
            watch.cancel()


@pytest.mark.parametrize("weights", [V7, None], ids=["serving", "before its first weights"])
async def test_the_second_run_on_a_server_is_refused_by_name_and_touches_nothing(weights):
    async with FakeEngine() as server, driven(server, weights=weights) as (engine, watch):
        name = server.weight_version
        num_pauses = len(server.pauses)
        async with client_of(server) as client:
            with pytest.raises(EngineInUse) as caught:
                await attach(client, Y, answer_s=5.0)
        assert "is driven by run x-1 (gen/0), this is run y-2" in str(caught.value)
        assert "engine.urls" in str(caught.value)
        assert caught.value.holder == X
        assert server.weight_version == name == engine.names.served(weights)
        assert len(server.pauses) == num_pauses, "a pause would stop the first run's requests"
        assert not watch.done()


async def test_another_slot_of_the_same_run_is_refused_as_a_mistake_in_the_list():
    twin = Holder(X.run, "gen/1")
    async with FakeEngine() as server, driven(server), client_of(server) as client:
        with pytest.raises(EngineInUse, match=r"gen/0 of this run .* names one server twice"):
            await attach(client, twin, answer_s=5.0)


@pytest.mark.parametrize("me", [Y, X], ids=["a new run", "the same slot, started again"])
async def test_a_server_of_a_dead_run_is_taken_over(me):
    async with FakeEngine() as server, client_of(server) as client:
        server.weight_version = f"{X}:{V7}"
        greeted = await attach(client, me)
        assert server.weight_version == f"{me}:none" == greeted.names.served(None)
        asked = [c.body for c in server.calls if c.path is Route.UPDATE_VERSION]
        assert [body["new_version"] for body in asked] == (
            [f"{X}:{V7}?{Y}", f"{Y}:none"] if me is Y else [f"{X}:none"]
        )
        assert not any(body["abort_all_requests"] for body in asked)


async def test_while_a_server_is_paused_its_driver_has_longer_to_answer():
    """It may be in the middle of an update, which brings its name at the end."""
    async with FakeEngine() as server, client_of(server) as client:
        server.weight_version = f"{X}:{V7}"
        server._paused = True
        waiting = asyncio.create_task(require_free(client, Y, answer_s=0.01))
        await server.called(Route.READY, 2)
        assert not waiting.done()
        server.weight_version = f"{X}:1.8"
        with pytest.raises(EngineInUse, match="driven by run x-1"):
            await waiting


async def test_of_two_newcomers_the_later_question_counts():
    third = Holder("z-3", "gen/0")
    async with FakeEngine() as server, client_of(server) as client:
        server.weight_version = f"{X}:{V7}"
        waiting = asyncio.create_task(require_free(client, Y, answer_s=5.0))
        await server.called(Route.UPDATE_VERSION)
        server.weight_version = f"{X}:{V7}?{third}"
        with pytest.raises(EngineInUse, match="driven by run z-3"):
            await waiting


async def test_a_server_that_is_started_again_while_it_is_asked_is_asked_again():
    async with FakeEngine() as server, client_of(server) as client:
        server.weight_version = f"{X}:{V7}"
        waiting = asyncio.create_task(require_free(client, Y, answer_s=5.0))
        await server.called(Route.UPDATE_VERSION)
        server.weight_version = "default"
        with pytest.raises(GenerationError, match="started again") as caught:
            await waiting
        assert caught.value.retryable


@pytest.mark.parametrize(
    ("name", "says", "taken_by"),
    [
        ("y-2:gen/0:1.7", "driven by run y-2 (gen/0), this is run x-1", Y),
        ("y-2:gen/0:none", "driven by run y-2 (gen/0), this is run x-1", Y),
        ("default", "which run x-1 has not given it", None),
        ("x-1:gen/0:1.6", "should serve 'x-1:gen/0:1.7'", None),
    ],
)
async def test_an_idle_engine_under_another_name_is_found(name, says, taken_by):
    """A run that waits for its trainer sends no request that would show it."""
    async with FakeEngine() as server, driven(server) as (engine, watch):
        server.weight_version = name
        async with asyncio.timeout(5):
            assert says in await watch
        assert engine.taken_by == taken_by


async def test_the_name_is_not_judged_during_an_update():
    async with FakeEngine() as server, driven(server) as (engine, watch):
        engine.begin_update(WeightsName(1, 8))
        server.weight_version = "y-2:gen/0:1.7"
        asked = server.num_calls(Route.MODEL_INFO)
        for _ in range(20):
            await asyncio.sleep(LOOK_S)
        assert not watch.done()
        assert server.num_calls(Route.MODEL_INFO) <= asked + 1


async def test_a_server_left_in_order_is_taken_without_a_question():
    async with FakeEngine() as server, client_of(server) as client:
        greeted = await attach(client, X)
        server.weight_version = greeted.names.served(V7)
        await let_go(client, greeted.names)
        assert ServedName.parse(server.weight_version) is None
        await asyncio.wait_for(attach(client, Y, answer_s=1000.0), 10)
        await let_go(client, greeted.names)
        assert server.weight_version == f"{Y}:none", "it is another's by now"


async def test_a_server_that_cannot_be_renamed_is_guarded_by_names_alone():
    async with FakeEngine() as server, client_of(server) as client:
        server.missing = {Route.UPDATE_VERSION}
        server.weight_version = f"{X}:{V7}"
        greeted = await attach(client, Y, answer_s=1000.0)
        assert greeted.names.served(None) == f"{X}:{V7}"


async def test_a_router_is_told_from_an_engine():
    """sglang-router passes on /generate and /health, and none of the control calls."""
    async with FakeEngine() as server, client_of(server) as client:
        server.missing = {Route.SERVER_INFO}
        with pytest.raises(NotAnEngine, match=r"is a router \(sglang-router.*engine.urls"):
            await attach(client, X)
        assert server.pauses == []


async def test_several_servers_behind_one_address_are_told_before_any_is_paused():
    """A pause would reach one and the continue another."""
    async with FakeEngine() as server, client_of(server) as client:
        info = server.server_info()
        infos = iter([info] * 3)
        other = type(info)(version="fake", engine="embedded", instance="second")
        server.server_info = lambda: next(infos, other)
        with pytest.raises(NotAnEngine, match=r"several servers behind one address .*second"):
            await attach(client, X)
        assert server.pauses == []
