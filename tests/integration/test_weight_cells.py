"""Cells of several engines and ranks over real gloo: membership, losses, restarts of the others."""

import asyncio
import multiprocessing

import pytest

from async_grpo.config.weights import Transport
from async_grpo.engine_api import Path as Route
from async_grpo.errors import ConfigError
from async_grpo.replay_parts import EngineState
from async_grpo.weights.disk import DiskTransport
from tests.fakes.engine_process import Mishap, process_facts
from tests.fakes.gloo_world import GlooWorld, trainer_process

pytestmark = pytest.mark.timeout(300)  # a dozen processes on a busy machine

NUM_REBUILDS = 20


async def test_two_engines_of_two_ranks_share_a_group(tmp_path):
    async with GlooWorld(tmp_path, engines_per_cell=2, tp_size=2).whole() as world:
        for version in range(2):
            result = await world.publish(version)
            assert result.failures == []
            assert result.num_cells == 1
            assert len({report.checksum for report in result.reports}) == 1
            await world.until(lambda version=version: world.serves(version))
        groups = [process.facts()["groups"] for process in world.processes]
        assert groups[0] == groups[1]
        assert len(groups[0]) == 1, "the group is kept from update to update"
        (rendezvous,) = [
            live.rendezvous for live in world.publisher._transports["broadcast"]._groups.values()
        ]
        assert rendezvous.world_size == 1 + 2 * 2


@pytest.mark.timeout(600)  # an engine is started twenty times
async def test_a_cell_is_rebuilt_twenty_times_without_leaks(tmp_path):
    async with GlooWorld(tmp_path, engines_per_cell=2).whole() as world:
        assert (await world.publish(0)).failures == []
        ours, survivors, names = [], [], set()
        for version in range(1, NUM_REBUILDS + 1):
            leaver = world.status(1).engine_id
            gone = world.slots[1]
            gone.destroy()
            await world.until(lambda leaver=leaver: world.status(1).engine_id != leaver)
            await world.until(lambda: world.status(1).wants_sync)
            world.processes.remove(gone)
            gone.free()
            result = await world.publish(version)
            assert (result.failures, result.num_cells) == ([], 1)
            await world.until(lambda version=version: world.serves(version))
            survivors.append(world.slots[0].facts())
            names.add(tuple(survivors[-1].pop("groups")))
            ours.append(process_facts())
        assert len(names) == NUM_REBUILDS, "each group has a name of its own, one at a time"
        assert {len(groups) for groups in names} == {1}
    for facts in (survivors, ours):
        settled, last = facts[2], facts[-1]
        assert last["torch_groups"] == settled["torch_groups"]
        assert last["torch_tags"] == settled["torch_tags"]
        assert last["fds"] <= settled["fds"] + 3, "some come and go with requests"
        assert last["threads"] <= settled["threads"] + 3


@pytest.mark.parametrize(
    ("mishap", "skip", "others_commit"),
    [
        (Mishap.REFUSE, 0, True),
        (Mishap.REFUSE, 1, True),
        (Mishap.WRONG_SHAPE, 0, True),
        (Mishap.DIE_BEFORE, 0, False),
        (Mishap.DIE_DURING, 1, False),
        (Mishap.DIE_AFTER, 1, True),
    ],
)
async def test_an_announced_bucket_is_finished_for_the_rest_of_the_cell(
    tmp_path, mishap, skip, others_commit
):
    """Refusals leave the collective whole; a death breaks it, and the rest comes free at least."""
    async with GlooWorld(tmp_path, engines_per_cell=2).whole() as world:
        await world.publish(0)
        await world.until(lambda: world.serves(0))
        other, victim = (world.status(slot).engine_id for slot in (0, 1))
        world.slots[1].plan(Route.UPDATE_FROM_DISTRIBUTED, mishap, skip=skip)
        (failure,) = (await world.publish(1)).failures
        assert f"{victim} is failed" in failure
        await world.until(lambda: world.status(1).wants_sync)
        if others_commit:
            await world.until(lambda: str(world.status(0).weights) == "1.1")
            assert world.status(0).engine_id == other
        else:
            await world.until(
                lambda: str(world.status(0).weights) == "1.1" or world.status(0).wants_sync
            )
        await world.serve_wishes()
        await world.until(lambda: world.serves(1))
        result = await world.publish(2)
        assert (result.failures, result.num_cells) == ([], 1)
        await world.until(lambda: world.serves(2))


@pytest.mark.parametrize(
    ("frozen_at", "skip", "arrives"),
    [(Route.BEGIN_UPDATE, 0, False), (Route.UPDATE_FROM_DISTRIBUTED, 1, True)],
)
async def test_an_update_survives_a_restart_of_the_replay_server(
    tmp_path, frozen_at, skip, arrives
):
    """Once the buckets flow nobody needs the server; before, the update is asked for again."""
    async with GlooWorld(tmp_path, engines_per_cell=2).whole() as world:
        await world.publish(0)
        await world.until(lambda: world.serves(0))
        engine_ids = [world.status(slot).engine_id for slot in (0, 1)]
        world.slots[1].plan(frozen_at, Mishap.FREEZE, skip=skip)
        publish = asyncio.create_task(world.publish(1))
        await world.slots[1].frozen()
        await world.stop_server()
        await world.start_server(world.config)
        world.slots[1].thaw()
        await publish
        if not arrives:
            await world.until(lambda: not world.engine(1).updating)
            assert (await world.serve_wishes()).failures == []
        await world.until(lambda: world.serves(1))
        assert [world.status(slot).engine_id for slot in (0, 1)] == engine_ids
        assert str((await world.replay.watch(0)).live) == "1.1"
        assert (await world.publish(2)).failures == []


@pytest.mark.parametrize("owned", [True, False], ids=["owned", "attached"])
@pytest.mark.parametrize(
    ("frozen_at", "skip"),
    [
        (Route.BEGIN_UPDATE, 0),
        (Route.INIT_GROUP, 0),
        (Route.UPDATE_FROM_DISTRIBUTED, 0),
        (Route.UPDATE_FROM_DISTRIBUTED, 1),
        (Route.END_UPDATE, 0),
    ],
)
async def test_a_trainer_that_dies_in_an_update_leaves_engines_that_can_go_on(
    tmp_path, frozen_at, skip, owned
):
    # nobody comes to the rendezvous of a dead trainer: its engines wait for their deadline
    deadlines = {"timeout_s": 8.0} if frozen_at is Route.INIT_GROUP else {}
    world = GlooWorld(tmp_path, owned=owned, engines_per_cell=2, peer_timeout_s=4.0, **deadlines)
    async with world.whole(trainer=False):
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        trainer = context.Process(target=trainer_process, args=(world.config, theirs))
        await asyncio.to_thread(trainer.start)
        try:
            assert await asyncio.to_thread(ours.recv) == 1
            if frozen_at is not Route.INIT_GROUP:  # there, the first update is the one that fails
                ours.send(0)
                assert await asyncio.to_thread(ours.recv) == []
            world.slots[1].plan(frozen_at, Mishap.FREEZE, skip=skip)
            ours.send(1)
            await world.slots[1].frozen()
        finally:
            trainer.kill()
            trainer.join(10)
            ours.close()
        world.slots[1].thaw()
        await world.start_trainer()
        assert world.incarnation == 2
        await world.until(lambda: not any(world.updating(slot) for slot in (0, 1)))
        await world.publish(0)
        while not world.serves(0):  # an engine that was still coming back missed it
            await world.until(lambda: world.serves(0) or world.num_wishing > 0)
            if world.num_wishing:
                await world.serve_wishes()
        assert (await world.publish(1)).failures == []
        await world.until(lambda: world.serves(1))


@pytest.mark.parametrize("transport", [Transport.disk, Transport.http])
async def test_weights_travel_as_files(tmp_path, transport):
    async with GlooWorld(tmp_path, weights={"transport": transport}).whole() as world:
        for version in range(3):
            result = await world.publish(version)
            assert result.failures == []
            assert len(result.reports) == 2
            await world.until(lambda version=version: world.serves(version))
        assert all(process.facts()["groups"] == [] for process in world.processes)
        late = world.status(1).engine_id
        world.slots[1].destroy()
        await world.until(lambda: world.status(1).engine_id != late)
        await world.until(lambda: world.status(1).wants_sync)
        assert (await world.serve_wishes()).failures == []
        await world.until(lambda: world.serves(2))
    if transport is Transport.disk:
        assert [path.name for path in (tmp_path / "weights").iterdir()] == ["1.2"]
        files = sorted(path.name for path in (tmp_path / "weights" / "1.2").iterdir())
        assert files == [
            "manifest.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]  # fmt: skip


@pytest.mark.parametrize("late", [Transport.disk, Transport.http])
async def test_a_late_engine_gets_files_while_the_rest_gets_broadcasts(tmp_path, late):
    world = GlooWorld(tmp_path, engines_per_cell=2, weights={"late_transport": late})
    async with world.whole():
        await world.publish(0)
        gone = world.status(1).engine_id
        world.slots[1].destroy()
        await world.until(lambda: world.status(1).engine_id != gone)
        await world.until(lambda: world.status(1).wants_sync)
        assert (await world.serve_wishes()).failures == []
        await world.until(lambda: world.serves(0))
        assert len(world.slots[0].facts()["groups"]) == 1
        assert world.slots[1].facts()["groups"] == []
        assert (await world.publish(1)).failures == []
        assert world.slots[0].facts()["groups"] == world.slots[1].facts()["groups"]


async def test_a_damaged_file_is_never_loaded(tmp_path):
    """It costs no engine: nothing was sent, and all go on with what they have."""
    world = GlooWorld(tmp_path, weights={"late_transport": Transport.disk})
    async with world.whole():
        await world.publish(0)
        gone = world.status(1).engine_id
        world.slots[1].destroy()
        await world.until(lambda: world.status(1).engine_id != gone)
        await world.until(lambda: world.status(1).wants_sync)
        transport = world.publisher._transports[Transport.disk]
        files = transport.prepare(world.publisher._snapshot)
        victim = tmp_path / "weights" / "1.0" / files.files[0].name
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(content)
        waiting = world.status(1).engine_id
        (failure,) = (await world.serve_wishes()).failures
        assert "sha256" in failure
        assert "fetch" in failure
        assert world.status(1).engine_id == waiting
        assert world.slots[1].alive
        assert (await world.publish(1)).failures == []
        await world.until(lambda: world.serves(1))


def test_a_directory_with_other_things_in_it_is_refused(tmp_path):
    (tmp_path / "1.0").mkdir()
    (tmp_path / ".partial-1.1").mkdir()
    DiskTransport(tmp_path, 1.0)
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(ConfigError, match=r"holiday\.jpg"):
        DiskTransport(tmp_path, 1.0)


async def test_an_engine_whose_updates_always_fail_is_dead(tmp_path):
    world = GlooWorld(tmp_path, owned=False, weights={"max_failures": 2})
    async with world.whole():
        world.slots[1].plan(Route.UPDATE_FROM_DISTRIBUTED, Mishap.WRONG_SHAPE)
        lives = {world.status(1).engine_id}
        assert len((await world.publish(0)).failures) == 1
        await world.until(lambda: world.status(1).wants_sync)
        lives.add(world.status(1).engine_id)
        assert len((await world.serve_wishes()).failures) == 1
        await world.until(lambda: world.status(1).state is EngineState.DEAD)
        assert len(lives) == 2
        result = await world.publish(1)
        assert (result.failures, result.num_cells) == ([], 1)
        await world.until(lambda: str(world.status(0).weights) == "1.1")


async def test_an_engine_that_takes_files_but_no_broadcast_is_dead(tmp_path):
    weights = {"max_failures": 2, "late_transport": Transport.disk}
    world = GlooWorld(tmp_path, owned=False, weights=weights)
    async with world.whole():
        world.slots[1].plan(Route.UPDATE_FROM_DISTRIBUTED, Mishap.REFUSE)
        assert len((await world.publish(0)).failures) == 1
        await world.until(lambda: world.status(1).wants_sync)
        assert (await world.serve_wishes()).failures == []
        await world.until(lambda: world.serves(0))
        world.slots[1].plan(Route.UPDATE_FROM_DISTRIBUTED, Mishap.REFUSE)
        assert len((await world.publish(1)).failures) == 1
        await world.until(lambda: world.status(1).state is EngineState.DEAD)
        assert (await world.publish(2)).failures == []
