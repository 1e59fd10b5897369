import asyncio
import os
import signal
import sys

import pytest

from async_grpo.config.engine import EngineSection
from async_grpo.engine_api import SGLANG_RESERVE, Load, ModelInfo, ServerInfo
from async_grpo.engine_api import Path as Route
from async_grpo.errors import EngineMisconfigured, GenerationError
from async_grpo.generation import lifecycle
from async_grpo.generation.engines import UpdateKind
from async_grpo.generation.lifecycle import EngineSlot
from async_grpo.generation.starts import start_announced
from async_grpo.replay_parts import EngineState
from async_grpo.types import WeightsName

LISTENS = """
import sys, time
print("noise", file=sys.stderr, flush=True)
print('{"url": "http://127.0.0.1:1"}', flush=True)
while True: print("x" * 9999, flush=True); time.sleep(0.001)
"""


async def test_a_process_of_ours_says_its_address_and_ends_with_its_log_named(tmp_path):
    log = tmp_path / "logs" / "engine.log"
    handle = await start_announced([sys.executable, "-c", LISTENS], log, env={}, timeout_s=20.0)
    assert handle.url == "http://127.0.0.1:1"
    ended = asyncio.create_task(handle.wait())
    await handle.kill()
    assert str(log) in await ended
    assert f"code -{signal.SIGKILL.value}" in await ended
    assert "noise" in log.read_text()


async def test_terminate_lets_it_end_by_itself(tmp_path):
    handle = await start_announced(
        [sys.executable, "-c", LISTENS], tmp_path / "log", env={}, timeout_s=20.0
    )
    await handle.terminate()
    assert f"code -{signal.SIGTERM.value}" in await handle.wait()


@pytest.mark.parametrize(
    ("program", "timeout_s", "message"),
    [
        ("raise SystemExit(4)", 20.0, r"ended before it listened \(exit code 4\)"),
        ("print('hello')", 20.0, "printed b'hello"),
        ("import time; time.sleep(60)", 0.3, "printed no address"),
    ],
)
async def test_a_process_that_does_not_come_up_is_an_error(tmp_path, program, timeout_s, message):
    with pytest.raises(GenerationError, match=message):
        await start_announced(
            [sys.executable, "-c", program], tmp_path / "log", env={}, timeout_s=timeout_s
        )


async def test_a_process_that_ends_with_code_2_is_misconfigured_and_its_last_line_comes_first(
    tmp_path,
):
    log = tmp_path / "log"
    program = "import sys; print('usage\\nno such flag: --foo', file=sys.stderr); sys.exit(2)"
    with pytest.raises(EngineMisconfigured) as before:
        await start_announced([sys.executable, "-c", program], log, env={}, timeout_s=20.0)
    told = """print('{"url": "http://127.0.0.1:1"}', flush=True); """
    program = program.replace("print('usage", told + "print('usage")
    handle = await start_announced([sys.executable, "-c", program], log, env={}, timeout_s=20.0)
    with pytest.raises(EngineMisconfigured) as after:
        await handle.wait()
    await handle.kill()
    for error in (before.value, after.value):
        first, *others = str(error).splitlines()
        assert "(exit code 2, configuration): no such flag: --foo; the end of " in first
        assert [line.strip() for line in others] == ["usage", "no such flag: --foo"]


async def test_a_cancelled_start_leaves_no_process(tmp_path):
    pipe = tmp_path / "pid"
    os.mkfifo(pipe)
    program = f"import os, time; open({str(pipe)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    starting = asyncio.create_task(
        start_announced([sys.executable, "-c", program], tmp_path / "log", env={}, timeout_s=30.0)
    )
    pid = int(await asyncio.to_thread(pipe.read_text))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class Client:
    """Answers /server_info while `alive`, /ready with `is_ready`."""

    url = "http://fake"

    def __init__(self, slot):
        self.server = slot
        self.alive = True
        self.num_failures = 0
        self.is_ready = slot.is_ready
        self.info = slot.info
        self.calls = []
        self._asked = slot.changed

    async def server_info(self, *, timeout_s):
        self.calls.append(Route.SERVER_INFO)
        self._asked.set()
        if self.num_failures:
            self.num_failures -= 1
            raise GenerationError("busy", retryable=True)
        if not self.alive:
            raise GenerationError("no answer", retryable=True)
        return self.info

    async def ready(self):
        self.calls.append(Route.READY)
        self._asked.set()
        return self.is_ready

    async def pause(self, mode):
        self.calls.append(Route.PAUSE)

    async def end_update(self, *, missing_ok=False):
        self.calls.append(Route.END_UPDATE)

    async def destroy_group(self, group_name):
        self.calls.append((Route.DESTROY_GROUP, group_name))

    async def abort_all(self):
        self.calls.append(Route.ABORT)

    async def resume(self):
        self.calls.append(Route.CONTINUE)

    async def fresh_server_info(self):
        return self.server.fresh_infos.pop() if self.server.fresh_infos else self.info

    async def model_info(self):
        return ModelInfo(model_path="fake", weight_version=self.server.weight_version)

    async def rename_weights(self, name):
        self.server.weight_version = name
        return True

    async def load(self):
        return Load(max_total_num_tokens=100, max_running_requests=4)

    async def context_length(self):
        return 50

    async def adopt(self, info):
        self.calls.append("adopt")

    async def close(self):
        self.calls.append("close")


class Handle:
    url = "http://fake"

    def __init__(self, owned):
        self.owned = owned
        self.ended = asyncio.Event()
        self.misconfigured = False
        self.calls = []

    async def wait(self):
        await self.ended.wait()
        if self.misconfigured:
            raise EngineMisconfigured("no such flag")
        return "exit\n    the end of its log"

    async def kill(self):
        self.calls.append("kill")

    async def terminate(self):
        self.calls.append("terminate")


class Slot:
    """An EngineSlot whose processes are fakes, with a way to wait for its changes."""

    def __init__(
        self,
        monkeypatch,
        *,
        owned=True,
        max_restarts=2,
        start_timeout_s=5.0,
        is_ready=True,
        max_failed_updates=None,
    ):
        self.now = 0.0
        for name in ("FIRST_BACKOFF_S", "LONGEST_BACKOFF_S", "READY_RETRY_S"):
            monkeypatch.setattr(lifecycle, name, 0.001)
        self.handles, self.clients, self.ids = [], [], []
        self.info = ServerInfo(version="fake")
        self.owned, self.is_ready = owned, is_ready
        self.start_failures = 0
        self.weight_version = "default"
        self.fresh_infos = []
        self.changed = asyncio.Event()
        self.slot = EngineSlot(
            "gen/0",
            self.start,
            self.make_client,
            EngineSection(max_restarts=max_restarts, start_timeout_s=start_timeout_s),
            liveness_s=0.001,
            on_change=self.changed.set,
            max_failed_updates=max_failed_updates,
            clock=lambda: self.now,
            run="run",
            answer_s=0.02,
        )
        self.task = asyncio.create_task(self.slot.run())

    async def start(self, engine_id):
        self.ids.append(engine_id)
        if self.start_failures:
            self.start_failures -= 1
            raise GenerationError("will not start", retryable=True)
        self.handles.append(Handle(self.owned))
        return self.handles[-1]

    def make_client(self, url):
        self.clients.append(Client(self))
        return self.clients[-1]

    async def life(self, number):
        """Wait until the engine of that life answers."""
        async with asyncio.timeout(5):
            while not (len(self.handles) == number and self.slot.engine is not None):
                await self.changed.wait()
                self.changed.clear()
        return self.slot.engine

    async def until(self, condition):
        """Wait for a change that makes it true."""
        async with asyncio.timeout(5):
            while not condition():
                await self.changed.wait()
                self.changed.clear()

    def commit(self, engine, weights, sequence, checksum, kind):
        """An update from its begin to its end; the server goes by the new name."""
        engine.begin_update(weights)
        self.weight_version = engine.names.served(weights)
        engine.commit(weights, sequence, checksum, kind)

    async def end(self):
        self.task.cancel()
        await asyncio.wait([self.task])


async def test_each_life_has_its_own_id_and_wants_a_sync(monkeypatch):
    slot = Slot(monkeypatch)
    first = await slot.life(1)
    assert first.status.wants_sync
    assert first.status.state is EngineState.SYNCING
    slot.handles[0].ended.set()
    second = await slot.life(2)
    assert first.engine_id != second.engine_id
    assert slot.slot.last_error == f"{first.engine_id}: exit"
    assert slot.slot.last_words == f"{first.engine_id}: exit\n    the end of its log"
    assert slot.clients[0].calls[-1] == "close"
    assert slot.handles[0].calls == ["kill"]
    await slot.end()
    assert slot.handles[1].calls == ["terminate"]


async def test_another_generator_process_of_the_same_name_uses_other_ids(monkeypatch):
    first, second = Slot(monkeypatch), Slot(monkeypatch)
    await first.life(1)
    await second.life(1)
    assert first.ids[0] != second.ids[0]
    assert first.ids[0].startswith("gen/0#")
    await first.end()
    await second.end()


async def test_a_condemned_engine_is_killed(monkeypatch):
    slot = Slot(monkeypatch)
    (await slot.life(1)).condemn("wrong weights")
    await slot.life(2)
    assert slot.handles[0].calls == ["kill"]
    assert "wrong weights" in slot.slot.last_error
    await slot.end()


async def test_an_engine_that_stops_answering_is_replaced(monkeypatch):
    slot = Slot(monkeypatch)
    await slot.life(1)
    slot.clients[0].alive = False
    await slot.life(2)
    assert "no sign of life" in slot.slot.last_error
    await slot.end()


async def test_b091_one_unanswered_question_is_no_death(monkeypatch):
    slot = Slot(monkeypatch)
    engine = await slot.life(1)
    client = slot.clients[0]
    for _ in range(3):
        client.num_failures = 1
        asked = len(client.calls)
        await slot.until(lambda asked=asked: len(client.calls) > asked + 4)
    assert slot.slot.engine is engine
    await slot.end()


async def test_liveness_is_not_judged_during_an_update(monkeypatch):
    slot = Slot(monkeypatch)
    engine = await slot.life(1)
    engine.begin_update(WeightsName(1, 0))
    slot.clients[0].alive = False
    asked = len(slot.clients[0].calls)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert len(slot.clients[0].calls) <= asked + 1
    assert slot.slot.engine is engine
    await slot.end()


async def test_the_budget_of_restarts_ends(monkeypatch):
    slot = Slot(monkeypatch, max_restarts=2)
    slot.start_failures = 99
    await asyncio.wait_for(slot.task, 5)
    assert len(slot.ids) == 3
    assert slot.slot.failed
    assert slot.slot.status.state is EngineState.DEAD
    assert "will not start" in slot.slot.last_error


async def serve_and_end(slot, number, service_s):
    """Life `number` gets weights, serves so long, and ends."""
    engine = await slot.life(number)
    slot.commit(engine, WeightsName(1, number), number, "checksum", UpdateKind.FILES)
    slot.now += service_s
    slot.handles[number - 1].ended.set()
    await slot.until(lambda: slot.slot.engine is not engine)


async def test_the_budget_of_restarts_refills_with_each_hour_of_service(monkeypatch):
    slot = Slot(monkeypatch, max_restarts=2)
    for number in range(1, 8):
        await serve_and_end(slot, number, 1800.0)
    await slot.life(8)
    assert not slot.slot.failed, "never more than two restarts within an hour of service"
    await serve_and_end(slot, 8, 1799.0)
    await asyncio.wait_for(slot.task, 5)
    assert slot.slot.failed, "the third within an hour"


async def test_time_without_service_refills_nothing(monkeypatch):
    slot = Slot(monkeypatch, max_restarts=2)
    for number in (1, 2, 3):
        await slot.life(number)
        slot.now += 7200.0  # it answers, but never gets weights
        slot.handles[number - 1].ended.set()
    await asyncio.wait_for(slot.task, 5)
    assert slot.slot.failed


async def test_an_engine_that_ends_because_of_its_configuration_is_not_started_again(monkeypatch):
    slot = Slot(monkeypatch, max_restarts=9)
    await slot.life(1)
    slot.handles[0].misconfigured = True
    slot.handles[0].ended.set()
    await asyncio.wait_for(slot.task, 5)
    assert len(slot.ids) == 1
    assert slot.slot.failed
    assert slot.slot.misconfigured
    assert slot.slot.last_words == f"{slot.ids[0]}: no such flag"


async def test_broadcasts_that_fail_in_each_life_end_a_slot_whose_files_arrive(monkeypatch):
    slot = Slot(monkeypatch, max_restarts=9, max_failed_updates=3)
    for number in (1, 2, 3):
        engine = await slot.life(number)
        slot.commit(engine, WeightsName(1, number), 2 * number, "checksum", UpdateKind.FILES)
        engine.failed_update = UpdateKind.BROADCAST
        engine.condemn("the broadcast failed")
        await slot.until(lambda engine=engine: slot.slot.engine is not engine)
    await asyncio.wait_for(slot.task, 5)
    assert slot.slot.failed
    assert len(slot.ids) == 3


async def test_a_broadcast_that_arrives_ends_the_row_of_failed_ones(monkeypatch):
    slot = Slot(monkeypatch, max_restarts=9, max_failed_updates=2)
    for number in (1, 2, 3):
        engine = await slot.life(number)
        slot.commit(engine, WeightsName(1, number), number, "checksum", UpdateKind.BROADCAST)
        engine.failed_update = UpdateKind.BROADCAST
        engine.condemn("the next broadcast failed")
    await slot.life(4)
    assert not slot.slot.failed
    await slot.end()


async def test_an_attached_engine_is_waited_for_and_cleaned_up(monkeypatch):
    slot = Slot(monkeypatch, owned=False, max_restarts=0, start_timeout_s=5.0)
    engine = await slot.life(1)
    cleanup = [Route.SERVER_INFO, Route.PAUSE, Route.END_UPDATE, Route.CONTINUE, Route.READY]
    assert slot.clients[0].calls[:7] == [*cleanup, Route.ABORT, "adopt"]
    assert (engine.num_slots, engine.info.context_length) == (3, 50 - SGLANG_RESERVE)
    engine.update_group = "of-a-dead-trainer"
    engine.condemn("quarantine")
    again = await slot.life(2)
    assert again.engine_id != engine.engine_id
    assert slot.clients[1].calls[3] == (Route.DESTROY_GROUP, "of-a-dead-trainer")
    assert not slot.slot.failed, "restarts are for engines of our own"
    await slot.end()


async def test_a_server_that_still_starts_is_waited_for(monkeypatch):
    slot = Slot(monkeypatch, is_ready=False)
    await slot.until(lambda: slot.clients and Route.READY in slot.clients[0].calls)
    assert slot.slot.engine is None
    await slot.until(lambda: "still starts" in slot.slot.last_error)
    assert Route.ABORT not in slot.clients[0].calls, "its warm-up request must not be aborted"
    slot.clients[0].is_ready = True
    await slot.life(1)
    assert slot.slot.last_error == "", "it was no error"
    await slot.end()


async def test_what_is_waited_for_does_not_hide_why_the_life_before_ended(monkeypatch):
    slot = Slot(monkeypatch)
    engine = await slot.life(1)
    slot.is_ready = False
    engine.condemn("the probe failed")
    await slot.until(lambda: "still starts; before: " in slot.slot.last_error)
    assert slot.slot.last_error.endswith(f"{engine.engine_id}: the probe failed")
    await slot.end()


async def test_an_engine_that_is_not_ready_gets_no_requests(monkeypatch):
    slot = Slot(monkeypatch)
    engine = await slot.life(1)
    slot.commit(engine, WeightsName(1, 0), 1, "checksum", UpdateKind.FILES)
    assert engine.serving
    slot.clients[0].is_ready = False
    await slot.until(lambda: not engine.serving)
    assert engine.status.state is EngineState.PAUSED
    slot.clients[0].is_ready = True
    await slot.until(lambda: engine.serving)
    assert engine.status.state is EngineState.SERVING
    await slot.end()


async def test_an_engine_that_is_not_ready_for_too_long_is_replaced(monkeypatch):
    slot = Slot(monkeypatch, owned=False, start_timeout_s=0.02)
    await slot.life(1)
    slot.clients[0].is_ready = False
    await slot.life(2)
    assert "not ready for" in slot.slot.last_error
    await slot.end()


@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"pp_size": 2}], ids=str)
async def test_a_server_that_no_update_reaches_whole_is_refused_at_once(monkeypatch, sizes):
    slot = Slot(monkeypatch, max_restarts=0, start_timeout_s=600.0)
    slot.info = ServerInfo(version="fake", **sizes)
    await asyncio.wait_for(slot.task, 5)
    assert slot.slot.failed
    assert f"the server has {next(iter(sizes))} 2" in slot.slot.last_error
    assert slot.clients[0].calls == [Route.SERVER_INFO, "close"]


async def test_an_attached_engine_that_refuses_is_asked_for_ever_and_says_why(monkeypatch):
    """It is none of our starts: a wrong model that is exchanged serves again, however late."""
    slot = Slot(monkeypatch, owned=False, max_restarts=1)
    right = slot.info
    slot.info = ServerInfo(version="fake", dp_size=2)
    await slot.until(lambda: len(slot.handles) > 8)
    assert not slot.slot.failed
    assert slot.slot.refused
    assert slot.slot.status.state is EngineState.QUARANTINED
    assert "dp_size 2" in slot.slot.last_error
    slot.info = right
    async with asyncio.timeout(5):
        while slot.slot.engine is None:
            await slot.changed.wait()
            slot.changed.clear()
    assert not slot.slot.refused
    await slot.end()


@pytest.mark.parametrize("owner", ["other-77:gen/0", "run:gen/1"], ids=["a run", "its twin"])
async def test_a_server_that_somebody_else_takes_is_given_up_for_good(monkeypatch, owner):
    """Two that took it back from each other would never end."""
    slot = Slot(monkeypatch, owned=False)
    engine = await slot.life(1)
    slot.commit(engine, WeightsName(1, 0), 1, "checksum", UpdateKind.FILES)
    slot.weight_version = f"{owner}:1.3"
    await asyncio.wait_for(slot.task, 5)
    assert slot.slot.failed
    assert slot.slot.misconfigured
    assert f"{owner}:1.3': it is driven by" in slot.slot.last_error
    assert len(slot.ids) == 1
    assert slot.weight_version == f"{owner}:1.3", "left alone"


async def test_another_process_at_the_same_address_begins_another_life(monkeypatch):
    slot = Slot(monkeypatch, owned=False)
    slot.info = ServerInfo(version="fake", instance="first")
    await slot.life(1)
    slot.clients[0].info = ServerInfo(version="fake", instance="second")
    await slot.until(lambda: "another process answers" in slot.slot.last_error)
    assert not slot.slot.failed
    await slot.end()


async def test_an_attached_server_is_left_to_the_next_one_in_order(monkeypatch):
    slot = Slot(monkeypatch, owned=False)
    engine = await slot.life(1)
    slot.commit(engine, WeightsName(1, 0), 1, "checksum", UpdateKind.FILES)
    await slot.end()
    assert slot.weight_version == "run:gen/0:1.0:left"
