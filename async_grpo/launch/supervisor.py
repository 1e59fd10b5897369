"""Keeps the roles of one run alive on one machine, and ends them together.

    who                     waits for                    unblocked by / at the latest
    run                     the first reason to end      the trainer's end, a used-up restart
                                                         budget, SIGINT, SIGTERM, SIGHUP
    _start_replay           the bound address            the file, its exit / replay_start_s
    _keep(role)             the role's exit              pidfd; the trainer's no_progress_timeout_s
    _stop                   everyone's exit              pidfd, a second Ctrl-C / shutdown_timeout_s

The first reason wins; everything after it is part of stopping. Knows the roles by their commands
only: it reads no ledger, no metrics and no message.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.config.launch import LaunchSection
from async_grpo.errors import ExitCode
from async_grpo.interfaces import Clock
from async_grpo.launch.processes import RoleCommand, RoleProcess, describe_exit, wait_all
from async_grpo.transport.restarts import RestartBudget

START_S = 60.0
"""Budget of the replay server from its start to its address, of a run that is new."""
KILL_S = 5.0
"""Budget of the kernel from SIGKILL to the exit."""
_FIRST_BACK_OFF_S, _MAX_BACK_OFF_S = 0.2, 5.0

REPLAY, TRAINER = "replay", "trainer"


@dataclass(frozen=True)
class RunCommands:
    """How to start each role of a run."""

    prepare: RoleCommand | None
    """runs to its end before the others; None: nothing to prepare"""
    bound_address: Path
    """the replay server writes its address here"""
    replay: Callable[[str | None], RoleCommand]
    """command of the replay server; the address to take again, or None for the configured one"""
    others: Callable[[str], Sequence[RoleCommand]]
    """commands of the trainer (named `trainer`) and the generators, given the address"""
    replay_start_s: float = START_S
    """budget of the replay server from its start to its address"""


@dataclass
class Outcome:
    """How a run ended."""

    code: ExitCode
    cause: str
    log_tail: str = ""
    """the end of the log of the role that ended the run"""
    restarts: dict[str, int] = field(default_factory=dict)
    killed: tuple[str, ...] = ()
    """roles that did not end in time"""


class Supervisor:
    """One run. `say` prints a line for people; `beside` runs along, given the address.

    `clock` (seconds) tells how long a process has lived, for its budget of restarts.
    """

    def __init__(
        self,
        settings: LaunchSection,
        commands: RunCommands,
        say: Callable[[str], None],
        beside: Callable[[str], Coroutine[Any, Any, None]] | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._settings = settings
        self._commands = commands
        self._say = say
        self._beside = beside
        self._processes: dict[str, RoleProcess] = {}
        self._clock = clock
        self._started_s: dict[str, float] = {}
        self._restarts: dict[str, int] = {}
        self._address = ""
        self._outcome: Outcome | None = None
        self._ended = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def processes(self) -> dict[str, RoleProcess]:
        """Role -> its newest process."""
        return dict(self._processes)

    @property
    def restarts(self) -> dict[str, int]:
        """Role -> times it was started again; of all roles that were started."""
        return {name: self._restarts.get(name, 0) for name in self._processes}

    async def run(self) -> Outcome:
        """Run until there is a reason to end; every process is gone when this returns."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._end, ExitCode.OK, "stopped by SIGTERM")
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # it is ignored under nohup
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        work = asyncio.create_task(self._work())
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()  # returns only by an exception or after a reason to end
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        finally:
            ended.cancel()
            killed = await self._stop()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
        assert self._outcome is not None, "work ended without a reason"
        self._outcome.restarts = dict(self._restarts)
        self._outcome.killed = killed
        return self._outcome

    async def _work(self) -> None:
        if not await self._prepare() or not await self._start_replay():
            return
        for command in self._commands.others(self._address):
            self._start(command)
        async with asyncio.TaskGroup() as group:
            for name in self._processes:
                group.create_task(self._keep(name))
            if self._beside is not None:
                group.create_task(self._beside(self._address))

    async def _prepare(self) -> bool:
        command = self._commands.prepare
        if command is None:
            return True
        self._say("making the initial model (policy.maker)")
        process = self._start(command)
        code = await process.wait()
        del self._processes[command.name]
        if code:
            known = code in (ExitCode.CONFIG, ExitCode.PEER)
            self._fail(process, code, ExitCode(code) if known else ExitCode.OTHER)
        return not code

    async def _start_replay(self) -> bool:
        path = self._commands.bound_address
        path.unlink(missing_ok=True)
        process = self._start(self._commands.replay(None))
        exited = asyncio.ensure_future(process.wait())
        budget_s = self._commands.replay_start_s
        deadline = asyncio.get_running_loop().time() + budget_s
        while not path.exists():
            # A file has no event without inotify; this happens once per run.
            await asyncio.wait({exited}, timeout=0.02)
            if exited.done():
                self._fail(process, exited.result(), _passed_on(exited.result()))
                return False
            if asyncio.get_running_loop().time() > deadline:
                self._end(ExitCode.PEER, f"{REPLAY} wrote no address within {budget_s:.0f} s")
                return False
        exited.cancel()
        self._address = path.read_text(encoding="utf-8").strip()
        return True

    def _start(self, command: RoleCommand) -> RoleProcess:
        process = RoleProcess(command)
        self._processes[command.name] = process
        self._started_s[command.name] = self._clock()
        return process

    async def _keep(self, name: str) -> None:
        """Restart a role that died, within its budget; the trainer goes on from a checkpoint."""
        budget = RestartBudget(self._settings.max_restarts)
        while True:
            process = self._processes[name]
            code = await process.wait()
            if code == ExitCode.OK:
                await self._stopped_by_itself(name)
                return
            if code != ExitCode.PEER:  # whoever gives up its peers has only waited
                budget.serve(self._clock() - self._started_s[name])
            used = budget.num_used
            if code in _final_codes(name) or not budget.take():
                self._fail(process, code, _passed_on(code))
                return
            self._restarts[name] = self._restarts.get(name, 0) + 1
            self._say(f"{name} {describe_exit(code)}; restart {used + 1} of {budget.limit}")
            await asyncio.sleep(min(_FIRST_BACK_OFF_S * 2**used, _MAX_BACK_OFF_S))
            command = self._commands.replay(self._address) if name == REPLAY else process.command
            self._start(command)

    async def _stopped_by_itself(self, name: str) -> None:
        """A clean exit: the run is over, or somebody stopped this role; then others starve."""
        generators = [each for each in self._processes if each not in {REPLAY, TRAINER}]
        if name == TRAINER:
            self._end(ExitCode.OK, "the trainer is done")
            return
        needed = name == REPLAY or not any(self._processes[each].running for each in generators)
        if not needed:
            self._say(f"{name} has stopped; the run goes on without it")
            return
        await asyncio.sleep(self._settings.shutdown_timeout_s)
        self._end(ExitCode.PEER, f"{name} was stopped while the trainer still runs")

    def _interrupt(self) -> None:
        if self._ended.is_set():
            self._hurry.set()
        else:
            limit_s = self._settings.shutdown_timeout_s
            self._say(f"stopping, within {limit_s:g} s; Ctrl-C again ends it at once")
        self._end(ExitCode.INTERRUPTED, "interrupted by Ctrl-C")

    def _hang_up(self) -> None:
        self._end(ExitCode.INTERRUPTED, "interrupted: the terminal was closed (SIGHUP)")

    def _fail(self, process: RoleProcess, code: int, exit_code: ExitCode) -> None:
        cause = f"{process.name} {describe_exit(code)}; see {process.command.log}"
        self._end(exit_code, cause, process.tail())

    def _end(self, code: ExitCode, cause: str, log_tail: str = "") -> None:
        if self._outcome is None:
            self._outcome = Outcome(code, cause, log_tail)
            self._ended.set()

    async def _stop(self) -> tuple[str, ...]:
        """End everyone within 0.75 shutdown_timeout_s, the replay server last.

        The rest of the time is for orphans and the summary. Returns who had to be killed.
        """
        budget_s = self._settings.shutdown_timeout_s
        workers_s = 0.6 * budget_s
        everyone = list(self._processes.values())
        trainer = self._processes.get(TRAINER)
        if trainer is not None and not trainer.running:  # it has told the others
            if await wait_all(everyone, 0.3 * budget_s, self._hurry):
                return ()
            workers_s -= 0.3 * budget_s
        workers = [process for process in everyone if process.name != REPLAY]
        for process in workers:
            process.terminate()
        await wait_all(workers, workers_s, self._hurry)
        servers = [process for process in everyone if process.name == REPLAY]
        for process in servers:
            process.terminate()
        await wait_all(servers, 0.15 * budget_s, self._hurry)
        late = [process for process in everyone if process.running]
        await self._kill(late)
        return tuple(process.name for process in late)

    async def _kill(self, late: Sequence[RoleProcess]) -> None:
        """What is left when the time is over, or when a second Ctrl-C has come."""
        if late and not self._hurry.is_set():
            names = ", ".join(process.name for process in late)
            self._say(
                f"{names} did not end in time and is killed; the trainer ends its step and writes "
                "a checkpoint: raise launch.shutdown_timeout_s if that takes longer"
            )
        for process in late:
            process.kill()
        if not await wait_all(late, KILL_S, asyncio.Event()):
            names = ", ".join(process.name for process in late if process.running)
            self._say(f"still there {KILL_S:.0f} s after SIGKILL: {names}")


def _final_codes(name: str) -> tuple[ExitCode, ...]:
    """Exit codes after which a restart would only end the same way.

    A trainer that ends with PEER has waited its own, long deadline for the other roles.
    """
    if name == TRAINER:
        return ExitCode.CONFIG, ExitCode.PEER, ExitCode.NUMERICS
    return (ExitCode.CONFIG,)


def _passed_on(code: int) -> ExitCode:
    """The exit code of a run that ends because a role ended with `code`."""
    if code in (ExitCode.CONFIG, ExitCode.NUMERICS):
        return ExitCode(code)
    return ExitCode.PEER
