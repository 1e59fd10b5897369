"""The failure matrix of weight sync: phase x mishap x owned or attached, on embedded engines.

Two engines, a cell each. Whatever becomes of one, the other commits and serves; the trainer goes
on; and the one that failed is brought back to the current weights: a process of its own is killed
and started again, somebody else's is quarantined until it answers.
"""

import time
from typing import Any

import pytest

from async_grpo.analysis.audit import audit
from async_grpo.engine_api import Path as Route
from async_grpo.weights.group import UpdateGroup, join_group
from tests.fakes.embedded_world import EmbeddedWorld
from tests.fakes.engine_process import Mishap

pytestmark = pytest.mark.faults

PHASES = {
    "pause": (Route.PAUSE, 0),
    "begin": (Route.BEGIN_UPDATE, 0),
    "init_group": (Route.INIT_GROUP, 0),
    "bucket 0": (Route.UPDATE_FROM_DISTRIBUTED, 0),
    "bucket 1": (Route.UPDATE_FROM_DISTRIBUTED, 1),
    "end": (Route.END_UPDATE, 0),
    "flush": (Route.FLUSH_CACHE, 0),
    "version": (Route.MODEL_INFO, 0),
    "checksum": (Route.WEIGHTS_CHECKER, 0),
    "resume": (Route.CONTINUE, 0),
    "probe": (Route.GENERATE, 0),
}
KEPT_ITS_WEIGHTS = {("init_group", Mishap.REFUSE)}
"""The cell could not meet, nothing was sent, and the engine answers: it goes on as it was."""
CASES = [
    (phase, mishap)
    for phase in PHASES
    for mishap in (Mishap.REFUSE, Mishap.HANG, Mishap.DIE_BEFORE, Mishap.DIE_AFTER)
    if (phase, mishap) != ("flush", Mishap.REFUSE)  # cached KV stays, and the segments say so
] + [
    ("bucket 0", Mishap.LOSE_SESSION),
    ("bucket 1", Mishap.LOSE_SESSION),
    ("bucket 0", Mishap.DIE_DURING),
    ("bucket 1", Mishap.DIE_DURING),
    ("bucket 1", Mishap.WRONG_SHAPE),
    ("bucket 0", Mishap.FREEZE),
]
LEFT_BEHIND = [
    (phase, mishap)
    for phase in ("bucket 0", "bucket 1")
    for mishap in (Mishap.NEVER_RETURN, Mishap.NO_MEMORY)
]
"""The trainer's own broadcast does not return either."""
MAY_LAST = {Mishap.HANG, Mishap.FREEZE, Mishap.DIE_DURING, Mishap.NEVER_RETURN}
"""Until a deadline. (Gloo does not always tell a sender that its receiver has died meanwhile.)"""
DEADLY = {Mishap.DIE_BEFORE, Mishap.DIE_DURING, Mishap.DIE_AFTER}
TOLERANCE = 1e-5
"""nats; float32 on both sides"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("owned", [True, False], ids=["owned", "attached"])
@pytest.mark.parametrize(("phase", "mishap"), CASES)
async def test_a_failure_costs_one_cell(tmp_path, phase, mishap, owned):
    deadlines = {"timeout_s": 4.0, "control_timeout_s": 3.0} if mishap in MAY_LAST else {}
    async with EmbeddedWorld(tmp_path, owned=owned, **deadlines).whole() as world:
        first = world.incarnation
        assert (await world.publish(0)).failures == []
        await world.until(lambda: world.serves(0))
        healthy, victim = (world.status(slot).engine_id for slot in (0, 1))
        process = world.slots[1]
        route, skip = PHASES[phase]
        if phase == "init_group":  # only a group that is built anew has this phase
            world.publisher._transports["broadcast"].keep_only([])
        process.plan(route, mishap, skip=skip)

        result = await world.publish(1)
        (failure,) = result.failures
        assert victim in failure
        assert healthy not in failure
        assert len(result.reports) == 1
        assert result.alarms == []
        await world.until(lambda: str(world.status(0).weights) == f"{first}.1")
        assert world.status(0).engine_id == healthy
        assert (await world.gap(0, 1)).max() < TOLERANCE

        if not owned and mishap in DEADLY:
            process.destroy()
            await world.new_process(1, port=process.port)
        if not owned and mishap is Mishap.FREEZE:
            process.thaw()
        if not owned and mishap is Mishap.WRONG_SHAPE:
            process.plan(route, Mishap.RIGHT_SHAPE)
        kept = (phase, mishap) in KEPT_ITS_WEIGHTS
        if not kept:
            await world.until(lambda: world.status(1).wants_sync)
        assert (world.status(1).engine_id == victim) == kept
        assert len(world.processes) == (2 if kept or (not owned and mishap not in DEADLY) else 3)
        assert process.alive != (mishap in DEADLY or (owned and not kept))

        assert (await world.serve_wishes()).failures == []
        await world.until(lambda: world.serves(1))
        assert (await world.publish(2)).failures == []
        await world.until(lambda: world.serves(2))
        assert world.status(0).engine_id == healthy
        assert (await world.gap(1, 2)).max() < TOLERANCE


def endless(**options: Any) -> UpdateGroup:
    """`join_group`, but no broadcast of the trainer's ends by itself, as over nccl."""
    return join_group(**{**options, "timeout_s": 3600.0})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("owned", [True, False], ids=["owned", "attached"])
@pytest.mark.parametrize(("phase", "mishap"), LEFT_BEHIND)
async def test_a_broadcast_that_never_ends_costs_one_cell(tmp_path, phase, mishap, owned):
    # an engine that has no memory says so: no deadline is waited for
    deadlines = {"timeout_s": 4.0, "control_timeout_s": 3.0} if mishap in MAY_LAST else {}
    async with EmbeddedWorld(tmp_path, owned=owned, join=endless, **deadlines).whole() as world:
        first = world.incarnation
        assert (await world.publish(0)).failures == []
        await world.until(lambda: world.serves(0))
        groups = await world.train(0)
        healthy, victim = (world.status(slot).engine_id for slot in (0, 1))
        process = world.slots[1]
        route, skip = PHASES[phase]
        process.plan(route, mishap, skip=skip)

        started = time.monotonic()
        result = await world.publish(1)
        seconds = time.monotonic() - started
        assert seconds < (15.0 if mishap in MAY_LAST else 10.0), "the deadlines, or half of one"
        (failure,) = result.failures
        assert victim in failure
        assert healthy not in failure
        assert len(result.reports) == 1
        assert result.alarms == []
        await world.until(lambda: str(world.status(0).weights) == f"{first}.1")
        assert world.status(0).engine_id == healthy
        groups += await world.train(1)

        if not owned and mishap is Mishap.NEVER_RETURN:  # nothing can be told to it any more
            process.destroy()
            await world.new_process(1, port=process.port)
        await world.until(lambda: world.status(1).wants_sync)
        assert world.status(1).engine_id != victim
        assert (await world.serve_wishes()).failures == []
        await world.until(lambda: world.serves(1))
        assert (await world.publish(2)).failures == []
        await world.until(lambda: world.serves(2))
        assert world.status(0).engine_id == healthy
        groups += await world.train(2)
        assert (await world.gap(1, 2)).max() < TOLERANCE
        assert world.worst_gap(groups) < TOLERANCE
    report = audit(tmp_path)
    assert report.ok, report.to_json()
    assert report.trained == len(groups) == 6
