"""`async-grpo run`: one run on one machine, from the configuration to the summary."""

import asyncio
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from async_grpo.config.load import load_config
from async_grpo.config.resume import resume_problems
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.devices.cards import place_engines
from async_grpo.errors import ConfigError, ExitCode
from async_grpo.generation.preflight import preflight
from async_grpo.launch.alone import (
    forget_start,
    holds_run,
    make_directory,
    require_model,
    write_config,
)
from async_grpo.launch.prepare import needs_preparation
from async_grpo.launch.processes import RoleCommand, adopt_orphans, end_orphans
from async_grpo.launch.screen import Picture, Screen
from async_grpo.launch.standard_streams import say
from async_grpo.launch.status import Show, StatusLine
from async_grpo.launch.summary import summarize
from async_grpo.launch.supervisor import (
    REPLAY,
    START_S,
    TRAINER,
    Outcome,
    RunCommands,
    Supervisor,
)
from async_grpo.replay.monitor_client import MonitorClient
from async_grpo.replay.store import Ledger
from async_grpo.replay_api.peers import StatsReply

LEDGER_BYTES_PER_S = 5e6
"""Of a start of the replay server that reads every record; five times less than was measured."""
ORPHAN_GRACE_S = 1.0
"""Budget of engines to notice that their generator is gone."""


def run(config: Config, *, resume: bool = False) -> ExitCode:
    """Run all roles; prints progress and a summary.

    Args:
        config: the run.
        resume: continue what the run directory holds; start a run if it holds none.

    Raises:
        ConfigError: the run directory already holds a run (without `resume`), one that `config`
            cannot continue, or one that still goes on.
    """
    directory = RunDirectory(Path(config.run.output_dir))
    if not needs_preparation(config):
        require_model(config, tokenizer=True)
    with hold_directory(directory):
        take_directory(directory, config, resume=resume)
        _require_fit(config, directory)
        return _run_in(directory, config)


def _require_fit(config: Config, directory: RunDirectory) -> None:
    """Say and write down what trainer and engines compute with.

    Raises:
        ConfigError: they do not fit each other or the cards.
    """
    found = preflight(config, whole_run=True)
    with directory.role_log("preflight").open("a", encoding="utf-8") as log:

        def tell(line: str) -> None:
            say(line)
            print(line, file=log)

        found.require(tell)


def _run_in(directory: RunDirectory, config: Config) -> ExitCode:
    adopt_orphans()
    outcome, status = asyncio.run(_supervise(config, directory))
    if num_killed := end_orphans(ORPHAN_GRACE_S):
        say(f"{num_killed} left-over processes had to be killed")
    if outcome.code is not ExitCode.OK:
        tail = f"\n{outcome.log_tail}" if outcome.log_tail else ""
        say(f"async-grpo: {outcome.cause}{tail}", sys.stderr)
    summary = summarize(config, directory, outcome, status.last_seen)
    say(summary.text)
    if outcome.code is ExitCode.OK and not summary.audit_ok:
        return ExitCode.OTHER
    return outcome.code


async def _supervise(config: Config, directory: RunDirectory) -> tuple[Outcome, StatusLine]:
    commands = run_commands(config, directory)
    with ExitStack() as stack:
        show: Show | None = None
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":  # on which nothing can move
            show = _shown_on(stack.enter_context(Screen()), config, lambda: supervisor.restarts)
        status = StatusLine(config, directory, lambda each: MonitorClient(each), say, show=show)
        supervisor = Supervisor(config.launch, commands, say, beside=status.loop)
        say(f"run directory {directory.root}; logs in {directory.logs}")
        outcome = await supervisor.run()
    return outcome, status


def _shown_on(screen: Screen, config: Config, restarts: Callable[[], dict[str, int]]) -> Show:
    """What draws the status on `screen`."""

    def show(stats: StatsReply, steps: list[dict[str, Any]], elapsed_s: float) -> None:
        picture = Picture(
            stats=stats,
            steps=steps,
            num_train_steps=config.run.num_train_steps,
            max_staleness=config.staleness.max_staleness,
            elapsed_s=elapsed_s,
            heartbeat_s=config.replay.heartbeat_s,
            restarts=restarts(),
        )
        screen.show(picture)

    return show


def run_commands(config: Config, directory: RunDirectory) -> RunCommands:
    """How `run` starts each role; every role reads the resolved configuration."""

    def command(
        name: str, subcommand: str, options: Sequence[str], *, address: str | None, threads: int
    ) -> RoleCommand:
        args = [sys.executable, "-m", "async_grpo", subcommand, str(directory.config), *options]
        if address is not None:
            args.append(f"replay.address={address}")
        return RoleCommand(name, args, directory.role_log(name), _environment(threads))

    def replay(address: str | None) -> RoleCommand:
        return command(REPLAY, REPLAY, [], address=address, threads=1)

    def others(address: str) -> list[RoleCommand]:
        trainer_threads, engine_threads = config.trainer.threads, config.engine.threads
        generators = [
            command(
                name, "generator", ["--name", name, *cards], address=address, threads=engine_threads
            )
            for name, cards in _generators(config)
        ]
        trainer = command(TRAINER, TRAINER, [], address=address, threads=trainer_threads)
        return [*generators, trainer]

    prepare = None
    if needs_preparation(config):
        prepare = command("prepare", "prepare", [], address=None, threads=config.trainer.threads)
    return RunCommands(
        prepare, directory.bound_address, replay, others, _replay_start_s(directory.ledger)
    )


def _replay_start_s(ledger: Path) -> float:
    """Enough to read every record of the ledger, should its snapshot be of no use."""
    num_bytes = ledger.stat().st_size if ledger.exists() else 0
    return START_S + num_bytes / LEDGER_BYTES_PER_S


def _generators(config: Config) -> Iterator[tuple[str, list[str]]]:
    """Name of each generator, and what it is told of its cards where several would take the same.

    Raises:
        ConfigError: there are too few cards.
    """
    count = config.launch.num_generators
    placed = place_engines(config, os.environ, trainer_here=True, num_generators=count)
    for index, device_ids in enumerate(placed):
        own: list[str] = []
        if count > 1 and device_ids:
            own = [f"engine.device_ids={json.dumps(device_ids)}", "launch.num_generators=1"]
        yield f"generator-{index}", own


@contextmanager
def hold_directory(directory: RunDirectory) -> Iterator[None]:
    """Let no other `run` begin there meanwhile: its roles would meet those of this one.

    Raises:
        ConfigError: the directory cannot be written to, or another `run` goes on there.
    """
    make_directory(directory)
    with directory.lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"run.output_dir: the run in {directory.root} is still going on; stop it, or "
                "choose another run.output_dir"
            ) from error
        yield


def take_directory(directory: RunDirectory, config: Config, *, resume: bool) -> None:
    """Write the resolved configuration to a directory that is held; see `run`."""
    if not holds_run(directory):
        forget_start(directory)
    elif resume:
        _require_resumable(directory, config)
    else:
        raise ConfigError(
            f"run.output_dir: {directory.root} already holds a run ({directory.ledger.name}); "
            "continue it with --resume, choose another run.output_dir, or remove the directory if "
            "its results are not needed"
        )
    write_config(directory, config)


def _require_resumable(directory: RunDirectory, config: Config) -> None:
    """Refuse another configuration, and a run that has nothing left to do."""
    if Ledger.is_in_use(directory.ledger):
        raise ConfigError(f"--resume: the run in {directory.root} is still going on")
    if not directory.config.is_file():
        raise ConfigError(f"--resume: {directory.config} is missing, so nothing can be compared")
    if problems := resume_problems(load_config(directory.config), config):
        raise ConfigError([f"--resume: {problem}" for problem in problems])
    versions = [version for _, version in directory.checkpoints_by_age()]
    if directory.final_model.exists() and max(versions, default=0) >= config.run.num_train_steps:
        raise ConfigError(
            f"run.num_train_steps: all {config.run.num_train_steps} train steps of "
            f"{directory.root} are done; raise it to go on"
        )


def _environment(threads: int) -> dict[str, str]:
    """A role that spins on cores of another slows both; each gets its own number of threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    fixed = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    return {name: str(threads) for name in names} | fixed
