"""Faults of weight sync that users of other engines met, tried on a generator; docs/sglang.md."""

import msgspec
import pytest
from aiohttp import web

from async_grpo.config.generation import OnWeightUpdate
from async_grpo.engine_api import Path as Route
from async_grpo.replay_parts import CellPhase
from async_grpo.types import Segment, WeightsName
from tests.fakes.fake_engine import FakeEngine, Fault, Script
from tests.fakes.generator_world import FakeHandle, World

V1 = WeightsName(1, 1)


async def next_life(world, engine_id):
    """Wait until the engine's slot holds another life, which wishes for weights; its id."""

    def others():
        return [
            e.engine_id for e in world.replay.engines if e.wants_sync and e.engine_id != engine_id
        ]

    await world.replay.until(lambda: bool(others()))
    return others()[0]


async def test_b061_an_update_that_failed_half_way_moves_no_version(tmp_path):
    """Bucket 2 of 3 is refused. The server itself takes the name of the last bucket all the same:
    only what the generator believes of it can keep the mixture from being used."""
    async with World(tmp_path, owned=False).running() as world:
        (engine_id,) = await world.replay.wanting()
        assert await world.replay.publish("1.0", [engine_id]) == [CellPhase.COMMITTED]
        (engine,) = world.engines
        sequence = await world.replay.order("1.1", [engine_id], num_buckets=3)
        await world.replay.phase_of(sequence, engine_id, CellPhase.BEGUN)
        engine.fail_next(Route.UPDATE_FROM_DISTRIBUTED, Fault.REFUSE, skip=1)
        await world.replay.go(sequence)
        await world.replay.phase_of(sequence, engine_id, CellPhase.FAILED)
        assert engine.weight_version == "run:gen/0:1.1", "what the server says of itself"
        again = await next_life(world, engine_id)
        assert [status.weights for status in world.replay.engines] == [None]
        world.replay.add_tickets(1)
        generated = engine.num_calls(Route.GENERATE)
        assert await world.replay.publish("1.1", [again]) == [CellPhase.COMMITTED]
        probe = [call.body for call in engine.calls if call.path is Route.GENERATE][generated]
        assert probe["rid"].startswith("probe-"), "nothing was sampled before it was resynced"
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
    assert world.replay.inserted[0].oldest_weights() == V1


@pytest.mark.parametrize("is_first", [True, False])
async def test_b062_b064_a_yes_without_weights_is_found_by_the_probe(tmp_path, is_first):
    """Acknowledged, the version moves, and the weights are what they were: random, or old."""
    async with World(tmp_path).running() as world:
        (engine_id,) = await world.replay.wanting()
        if not is_first:
            await world.replay.publish("1.0", [engine_id])
        (engine,) = world.engines
        engine.fail_next(Route.UPDATE_FROM_DISTRIBUTED, Fault.NOT_LOADED, times=2)
        assert await world.replay.publish("1.1", [engine_id]) == [CellPhase.FAILED]
        assert engine.weight_version == "run:gen/0:1.1"
        assert "probe" in world.replay.phases[-1][3]
        world.replay.add_tickets(1)
        again = await next_life(world, engine_id)
        assert await world.replay.publish("1.2", [again]) == [CellPhase.COMMITTED]
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
    assert world.replay.inserted[0].oldest_weights() == WeightsName(1, 2)


@pytest.mark.parametrize("mode", [m for m in OnWeightUpdate if m is not OnWeightUpdate.auto])
async def test_b063_no_update_leaves_cached_prefixes_to_new_requests(tmp_path, mode):
    """Flushed while paused where that is possible, and another namespace in any case."""
    async with World(tmp_path, on_weight_update=mode).running() as world:
        (engine_id,) = await world.replay.wanting()
        (engine,) = world.engines
        for version in range(3):
            since = len(engine.calls)
            await world.replay.publish(f"1.{version}", [engine_id])
            world.replay.add_tickets(1)
            await world.replay.until(lambda version=version: len(world.replay.inserted) > version)
            calls = engine.calls[since:]
            paths = [call.path for call in calls]
            if mode is not OnWeightUpdate.in_place:
                buckets_end = len(paths) - paths[::-1].index(Route.UPDATE_FROM_DISTRIBUTED)
                assert buckets_end < paths.index(Route.FLUSH_CACHE) < paths.index(Route.CONTINUE)
            sent = [call.body for call in calls if call.path is Route.GENERATE]
            served = f"run:gen/0:1.{version}"
            assert {body["extra_key"] for body in sent} == {served, f"probe-{served}"}
        assert engine.num_flushes == (0 if mode is OnWeightUpdate.in_place else 3)


async def test_a_server_restarted_behind_our_back_is_not_believed(tmp_path):
    """Between two heartbeats: what it samples under its checkpoint's name is never inserted."""
    async with World(tmp_path, owned=False).running() as world:
        (engine_id,) = await world.replay.wanting()
        await world.replay.publish("1.0", [engine_id])
        (engine,) = world.engines
        engine.weight_version = engine.loaded = "default"
        world.replay.add_tickets(1)
        again = await next_life(world, engine_id)
        assert world.replay.inserted == []
        assert await world.replay.publish("1.1", [again]) == [CellPhase.COMMITTED]
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
    assert world.replay.inserted[0].oldest_weights() == V1


class Listing(FakeEngine):
    """Says which tensors it has, as SGLang does; takes others all the same."""

    tensors: tuple[str, ...] = ("w",)
    in_step = False
    """its scheduler does not compute one step ahead"""

    def server_info(self):
        return msgspec.structs.replace(super().server_info(), disable_overlap_schedule=self.in_step)

    @web.middleware
    async def _observe(self, http, handler):
        response = await super()._observe(http, handler)
        if Route(http.path) is not Route.WEIGHTS_CHECKER:
            return response
        checksum = await self.checksum()
        ranks = [{"checksums": dict.fromkeys(self.tensors, checksum)}]
        return web.json_response({"per_engine_checksum": checksum, "ranks": ranks})


class ListingWorld(World):
    """One engine, which is `like` the attributes of `Listing`."""

    def __init__(self, directory, like, **options):
        super().__init__(directory, **options)
        self._like = like

    async def _start_engine(self, slot, engine_id):
        engine = Listing(like_sglang=True, manual=self._manual)
        vars(engine).update(self._like)
        await engine.start()
        self.engines.append(engine)
        self.handles.append(FakeHandle(engine, owned=True))
        return self.handles[-1]


async def test_names_that_a_server_does_not_have_are_never_sent(tmp_path):
    """It would say yes, and move its version. Compared once in each of its lives."""
    async with ListingWorld(tmp_path / "has", {"tensors": ("w", "v")}).running() as world:
        (engine_id,) = await world.replay.wanting()
        for version in range(2):
            ends = await world.replay.publish(f"1.{version}", [engine_id])
            assert ends == [CellPhase.COMMITTED]
        assert world.engines[0].num_calls(Route.WEIGHTS_CHECKER) == 1 + 2
    async with ListingWorld(tmp_path / "lacks", {"tensors": ("v",)}).running() as world:
        (engine_id,) = await world.replay.wanting()
        sequence = await world.replay.order("1.0", [engine_id])
        await world.replay.phase_of(sequence, engine_id, CellPhase.FAILED)
        assert "the server has no w" in world.replay.phases[-1][3]
        assert world.engines[0].num_calls(Route.BEGIN_UPDATE) == 0
        assert world.engines[0].num_calls(Route.UPDATE_FROM_DISTRIBUTED) == 0


@pytest.mark.parametrize(("in_step", "num_before"), [(False, 3), (True, 2)])
async def test_the_token_under_way_at_an_in_place_update_is_given_back(
    tmp_path, in_step, num_before
):
    """The server counts it to the weights behind the update; a scheduler in step has none."""
    options = {"manual": True, "group_size": 2, "on_weight_update": OnWeightUpdate.in_place}
    async with ListingWorld(tmp_path, {"in_step": in_step}, **options).running() as world:
        (engine_id,) = await world.replay.wanting()
        engine = await world.publish_by_hand("1.0", engine_id)
        engine.script = lambda request: Script([5] * request.sampling_params.max_new_tokens)
        world.replay.add_tickets(1)
        await engine.until(lambda: len(engine.running) == 2)
        await engine.step(2)
        await world.publish_by_hand("1.1", engine_id, fresh=False)
        await engine.step(6)
        await world.replay.until(lambda: len(world.replay.inserted) == 1)
    for rollout in world.replay.inserted[0].rollouts:
        before, after = rollout.sequences[0].segments
        assert before == Segment(weights=WeightsName(1, 0), num_tokens=num_before)
        assert after == Segment(weights=V1, num_tokens=8 - num_before, kv_mixed=True)
