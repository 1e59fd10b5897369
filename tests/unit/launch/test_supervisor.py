"""The supervisor with tiny programs in place of roles: what ends a run, and with which code."""

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_grpo.config.launch import LaunchSection
from async_grpo.errors import ExitCode
from async_grpo.launch.processes import RoleCommand
from async_grpo.launch.supervisor import Outcome, RunCommands, Supervisor

SERVER = """
import pathlib, signal, sys
path = pathlib.Path(sys.argv[1])
part = path.with_suffix(".part")
part.write_text("tcp://127.0.0.1:7")
part.rename(path)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True: signal.pause()
"""
WAITER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
while True: signal.pause()
"""
DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True: signal.pause()
"""


class FakeRun:
    """Commands of a run in a folder, and what the supervisor said."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        self.addresses: list[str | None] = []
        self.prepare: str | None = None
        self.server = SERVER
        self.trainer = WAITER
        self.generators = [WAITER]

    def supervisor(
        self,
        max_restarts: int = 2,
        shutdown_timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> Supervisor:
        settings = LaunchSection(max_restarts=max_restarts, shutdown_timeout_s=shutdown_timeout_s)
        prepare = self._command("prepare", self.prepare) if self.prepare else None
        commands = RunCommands(prepare, self.root / "address", self._replay, self._others)
        return Supervisor(settings, commands, self.said.append, clock=clock)

    def _replay(self, address: str | None) -> RoleCommand:
        self.addresses.append(address)
        return self._command("replay", self.server)

    def _others(self, address: str) -> list[RoleCommand]:
        assert address == "tcp://127.0.0.1:7"
        generators = [
            self._command(f"generator-{index}", source)
            for index, source in enumerate(self.generators)
        ]
        return [*generators, self._command("trainer", self.trainer)]

    def _command(self, name: str, source: str) -> RoleCommand:
        args = [sys.executable, "-S", "-c", source, str(self.root / "address")]
        return RoleCommand(name, args, self.root / "logs" / f"{name}.log")


@pytest.fixture
def fake(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 -- what other processes do has no event here
            await asyncio.sleep(0.01)


def up(supervisor: Supervisor, name: str, times: int = 1) -> bool:
    """The process has printed `up`, so its signal handler is in place."""
    process = supervisor.processes.get(name)
    return process is not None and process.tail().count("up") >= times


async def started(supervisor: Supervisor, *names: str) -> "asyncio.Task[Outcome]":
    task = asyncio.create_task(supervisor.run())
    await until(lambda: all(up(supervisor, name) for name in names))
    return task


def processes_in(folder: Path) -> list[int]:
    """Living processes whose command line names `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(folder) in path.read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def test_a_finished_trainer_ends_the_run_in_order(fake: FakeRun) -> None:
    fake.trainer = "pass"
    outcome = await fake.supervisor().run()
    assert (outcome.code, outcome.cause) == (ExitCode.OK, "the trainer is done")
    assert outcome.killed == ()
    assert processes_in(fake.root) == []


@pytest.mark.parametrize(
    ("status", "expected"),
    [(2, ExitCode.CONFIG), (3, ExitCode.PEER), (4, ExitCode.NUMERICS)],
)
async def test_a_failed_trainer_names_itself_and_passes_its_code_on(
    fake: FakeRun, status: int, expected: ExitCode
) -> None:
    fake.trainer = f"import sys; print('the loss is not finite'); sys.exit({status})"
    outcome = await fake.supervisor().run()
    assert outcome.code is expected
    assert f"trainer ended with exit code {status}" in outcome.cause
    assert "the loss is not finite" in outcome.log_tail
    assert outcome.restarts == {}


async def test_a_killed_trainer_is_restarted(fake: FakeRun) -> None:
    supervisor = fake.supervisor()
    task = await started(supervisor, "trainer", "generator-0")
    supervisor.processes["trainer"].kill()
    await until(lambda: up(supervisor, "trainer", times=2))
    supervisor.processes["trainer"].terminate()
    outcome = await task
    assert (outcome.code, outcome.cause) == (ExitCode.OK, "the trainer is done")
    assert outcome.restarts == {"trainer": 1}
    assert fake.said == ["trainer was killed by SIGKILL; restart 1 of 2"]


async def test_a_trainer_that_always_dies_ends_the_run_with_3(fake: FakeRun) -> None:
    fake.trainer = "raise SystemExit('out of memory')"
    outcome = await fake.supervisor(max_restarts=1).run()
    assert outcome.code is ExitCode.PEER
    assert "trainer ended with exit code 1" in outcome.cause
    assert "out of memory" in outcome.log_tail
    assert outcome.restarts == {"trainer": 1}


async def test_a_killed_generator_is_restarted(fake: FakeRun) -> None:
    supervisor = fake.supervisor()
    task = await started(supervisor, "trainer", "generator-0")
    supervisor.processes["generator-0"].kill()
    await until(lambda: up(supervisor, "generator-0", times=2))
    supervisor.processes["trainer"].terminate()
    outcome = await task
    assert outcome.code is ExitCode.OK
    assert outcome.restarts == {"generator-0": 1}
    assert fake.said == ["generator-0 was killed by SIGKILL; restart 1 of 2"]


@pytest.mark.parametrize(
    ("status", "expected"),
    [(1, {"generator-0": 3}), (3, {"generator-0": 1})],
    ids=["served", "waited in vain"],
)
async def test_an_hour_of_service_refills_the_budget(
    fake: FakeRun, status: int, expected: dict[str, int]
) -> None:
    # Three lives end after more than an hour by the fake clock; the fourth stops by itself.
    fake.generators = [
        "import pathlib, sys\n"
        "lives = pathlib.Path(sys.argv[1]).with_name('lives')\n"
        "with lives.open('a') as file: file.write('x')\n"
        f"sys.exit({status} if lives.stat().st_size < 4 else 0)"
    ]
    hours = itertools.count()
    supervisor = fake.supervisor(
        max_restarts=1, shutdown_timeout_s=0.5, clock=lambda: 3601.0 * next(hours)
    )
    outcome = await supervisor.run()
    assert outcome.restarts == expected
    if status == 1:
        assert fake.said[:3] == ["generator-0 ended with exit code 1; restart 1 of 1"] * 3


async def test_a_restarted_server_takes_its_address_again(fake: FakeRun) -> None:
    supervisor = fake.supervisor()
    task = await started(supervisor, "trainer")
    supervisor.processes["replay"].kill()
    await until(lambda: fake.addresses == [None, "tcp://127.0.0.1:7"])
    supervisor.processes["trainer"].terminate()
    outcome = await task
    assert outcome.restarts == {"replay": 1}


async def test_a_generator_that_never_lives_uses_up_its_budget(fake: FakeRun) -> None:
    fake.generators = ["raise SystemExit('no such device')"]
    outcome = await fake.supervisor(max_restarts=1).run()
    assert outcome.code is ExitCode.PEER
    assert outcome.restarts == {"generator-0": 1}
    assert "generator-0 ended with exit code 1" in outcome.cause
    assert "no such device" in outcome.log_tail


async def test_a_configuration_error_is_not_retried(fake: FakeRun) -> None:
    fake.generators = ["import sys; sys.exit(2)"]
    outcome = await fake.supervisor().run()
    assert outcome.code is ExitCode.CONFIG
    assert outcome.restarts == {}


async def test_one_of_two_generators_may_stop(fake: FakeRun) -> None:
    fake.generators = [WAITER, "pass"]
    supervisor = fake.supervisor()
    task = await started(supervisor, "trainer", "generator-0")
    await until(lambda: bool(fake.said))
    assert fake.said == ["generator-1 has stopped; the run goes on without it"]
    supervisor.processes["trainer"].terminate()
    assert (await task).code is ExitCode.OK


async def test_a_trainer_does_not_starve_in_silence(fake: FakeRun) -> None:
    fake.generators = ["pass"]
    outcome = await fake.supervisor(shutdown_timeout_s=0.5).run()
    assert outcome.code is ExitCode.PEER
    assert outcome.cause == "generator-0 was stopped while the trainer still runs"


async def test_a_server_without_an_address_ends_the_run(fake: FakeRun) -> None:
    fake.server = "import sys; print('address in use'); sys.exit(3)"
    outcome = await fake.supervisor().run()
    assert outcome.code is ExitCode.PEER
    assert "address in use" in outcome.log_tail


async def test_a_failed_preparation_ends_the_run_before_anything_starts(fake: FakeRun) -> None:
    fake.prepare = "raise SystemExit('the gate was not reached')"
    outcome = await fake.supervisor().run()
    assert outcome.code is ExitCode.OTHER
    assert "the gate was not reached" in outcome.log_tail
    assert fake.addresses == []


async def send_and_await(number: signal.Signals, task: Awaitable[Outcome]) -> tuple[Outcome, float]:
    began = time.monotonic()
    os.kill(os.getpid(), number)
    return await task, time.monotonic() - began


async def test_ctrl_c_ends_all_in_order(fake: FakeRun) -> None:
    supervisor = fake.supervisor()
    task = await started(supervisor, "trainer", "generator-0")
    outcome, _ = await send_and_await(signal.SIGINT, task)
    assert outcome.code is ExitCode.INTERRUPTED
    assert outcome.killed == ()
    assert processes_in(fake.root) == []


async def test_sigterm_is_a_clean_stop(fake: FakeRun) -> None:
    supervisor = fake.supervisor()
    task = await started(supervisor, "trainer", "generator-0")
    outcome, _ = await send_and_await(signal.SIGTERM, task)
    assert outcome.code is ExitCode.OK
    assert processes_in(fake.root) == []


@contextmanager
def on_hangup(action: signal.Handlers) -> Iterator[None]:
    """Whatever the tests themselves were started with: `nohup` ignores it."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_closed_terminal_ends_all_in_order(fake: FakeRun) -> None:
    with on_hangup(signal.SIG_DFL):
        supervisor = fake.supervisor()
        task = await started(supervisor, "trainer", "generator-0")
        outcome, _ = await send_and_await(signal.SIGHUP, task)
    assert (outcome.code, outcome.killed) == (ExitCode.INTERRUPTED, ())
    assert "SIGHUP" in outcome.cause
    assert processes_in(fake.root) == []


async def test_under_nohup_a_closed_terminal_ends_nothing(fake: FakeRun) -> None:
    with on_hangup(signal.SIG_IGN):
        supervisor = fake.supervisor()
        task = await started(supervisor, "trainer", "generator-0")
        os.kill(os.getpid(), signal.SIGHUP)
        outcome, _ = await send_and_await(signal.SIGTERM, task)
    assert outcome.code is ExitCode.OK


async def test_who_does_not_listen_is_killed_within_the_time_limit(fake: FakeRun) -> None:
    fake.trainer = DEAF
    supervisor = fake.supervisor(shutdown_timeout_s=2.0)
    task = await started(supervisor, "trainer", "generator-0")
    outcome, waited_s = await send_and_await(signal.SIGINT, task)
    assert outcome.code is ExitCode.INTERRUPTED
    assert outcome.killed == ("trainer",)
    assert waited_s < 2.0
    assert [line for line in fake.said if "trainer did not end in time and is killed" in line]
    assert processes_in(fake.root) == []


async def test_a_second_ctrl_c_does_not_wait(fake: FakeRun) -> None:
    fake.trainer = DEAF
    supervisor = fake.supervisor(shutdown_timeout_s=600.0)
    task = await started(supervisor, "trainer", "generator-0")
    os.kill(os.getpid(), signal.SIGINT)
    await until(lambda: not supervisor.processes["generator-0"].running)
    outcome, _ = await send_and_await(signal.SIGINT, task)
    assert outcome.code is ExitCode.INTERRUPTED
    assert processes_in(fake.root) == []
    assert fake.said == ["stopping, within 600 s; Ctrl-C again ends it at once"]


async def test_workers_of_a_role_end_with_it(fake: FakeRun) -> None:
    # The worker is in the role's process group and pays no heed to anything but SIGKILL.
    fake.generators = [
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-S', '-c', {DEAF!r}, sys.argv[1]])\n" + WAITER
    ]
    supervisor = fake.supervisor()
    task = await started(supervisor, "trainer")
    await until(lambda: up(supervisor, "generator-0", times=2))
    supervisor.processes["trainer"].terminate()
    await task
    await until(lambda: processes_in(fake.root) == [])
