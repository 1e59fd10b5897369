"""The process behind an engine: started here, or attached to by URL.

Knows how a process is started, watched and ended; nothing of what it serves.
"""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.errors import GenerationError
from async_grpo.transport.parent import start_child_async

logger = logging.getLogger(__name__)

TERMINATE_S = 5.0
"""From SIGTERM to SIGKILL at a clean stop."""


class EngineHandle(Protocol):
    """The process behind an engine, ours or not."""

    url: str
    owned: bool
    """ours to kill"""

    async def wait(self) -> str:
        """Return when it has ended, with the reason; never for an attached server."""
        ...

    async def kill(self) -> None:
        """End it now."""
        ...

    async def terminate(self) -> None:
        """End it cleanly, by force after a while."""
        ...


StartEngine = Callable[[str], Awaitable[EngineHandle]]
"""Starts the engine of the given id. Raises GenerationError, within its own deadline."""


class OwnedEngine:
    """An engine process that this generator started."""

    owned = True

    def __init__(self, process: Process, url: str, log: Path) -> None:
        self._process = process
        self.url = url
        self._log = log
        assert process.stdout is not None
        self._drain = asyncio.create_task(_drain(process.stdout))

    async def wait(self) -> str:
        """Wait for the process to end."""
        code = await self._process.wait()
        return f"its process ended with code {code}; see {self._log}"

    async def kill(self) -> None:
        """SIGKILL to the process and its children."""
        _signal_group(self._process, signal.SIGKILL)
        await self._process.wait()
        await self._drain

    async def terminate(self) -> None:
        """SIGTERM, and SIGKILL `TERMINATE_S` later."""
        _signal_group(self._process, signal.SIGTERM)
        try:
            async with asyncio.timeout(TERMINATE_S):
                await self._process.wait()
        except TimeoutError:
            logger.warning("engine process %d ignores SIGTERM; killing it", self._process.pid)
        await self.kill()


class AttachedEngine:
    """A server that somebody else runs."""

    owned = False

    def __init__(self, url: str) -> None:
        self.url = url

    async def wait(self) -> str:
        """Never returns: nobody tells us; unanswered calls do."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def kill(self) -> None:
        """Not ours to kill."""

    async def terminate(self) -> None:
        """Not ours to end."""


async def start_owned(args: Sequence[str], log: Path, *, timeout_s: float) -> OwnedEngine:
    """Start an engine process; it prints `{"url": ...}` once it listens.

    Args:
        args: the command.
        log: file for what it prints besides; appended to.
        timeout_s: deadline for that line.

    Raises:
        GenerationError: it ended, or printed no such line in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stderr:
        process = await start_child_async(args, stdout=PIPE, stderr=stderr)
    try:
        url = await _first_line_url(process, timeout_s)
    except BaseException as error:  # cancelled too: nobody else knows this process
        _signal_group(process, signal.SIGKILL)
        code = await process.wait()
        if isinstance(error, GenerationError):
            raise GenerationError(
                f"{error} (exit code {code}); see {log}", retryable=True
            ) from error
        raise
    return OwnedEngine(process, url, log)


async def _first_line_url(process: Process, timeout_s: float) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(timeout_s):
            line = await process.stdout.readline()
    except TimeoutError as error:
        raise GenerationError(
            f"the engine printed no address within {timeout_s:g} s", retryable=True
        ) from error
    if not line:
        raise GenerationError("the engine ended before it listened", retryable=True)
    try:
        return msgspec.json.decode(line, type=dict[str, str])["url"]
    except (msgspec.DecodeError, KeyError) as error:
        raise GenerationError(
            f"the engine printed {line[:200]!r} instead of its address", retryable=True
        ) from error


async def _drain(stream: asyncio.StreamReader) -> None:
    """Keep the pipe empty until its end: a full one would stop the writer."""
    while await stream.read(1 << 16):
        pass


def _signal_group(process: Process, number: signal.Signals) -> None:
    """Signal the process and its children: it leads its own session."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # has ended


def engine_starts(config: Config, name: str, config_args: Sequence[str]) -> list[StartEngine]:
    """How each engine slot of generator `name` gets its engine.

    Args:
        config: `engine.urls` are attached to; without any, `engine.num_engines` are started.
        name: of the generator.
        config_args: the command line's CONFIG and overrides, passed on to engines.
    """
    if config.engine.urls:
        return [partial(_attach, url) for url in config.engine.urls]
    directory = RunDirectory(Path(config.run.output_dir))
    args = [sys.executable, "-m", "async_grpo", "engine", *config_args, "engine.port=0"]
    return [
        partial(
            _start, args, directory.role_log(f"{name}.engine{slot}"), config.engine.start_timeout_s
        )
        for slot in range(config.engine.num_engines)
    ]


async def _attach(url: str, engine_id: str) -> EngineHandle:
    logger.info("engine %s: attaching to %s", engine_id, url)
    return AttachedEngine(url)


async def _start(args: list[str], log: Path, timeout_s: float, engine_id: str) -> EngineHandle:
    logger.info("engine %s: starting; its log is %s", engine_id, log)
    return await start_owned(args, log, timeout_s=timeout_s)
