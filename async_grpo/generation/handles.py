"""The process behind an engine: started here, or attached to by URL.

Knows how a process is watched and ended; nothing of its command or of what it serves.
"""

import asyncio
import logging
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.schema import Config
from async_grpo.errors import EngineMisconfigured, ExitCode, GenerationError

logger = logging.getLogger(__name__)

TERMINATE_S = 5.0
"""From SIGTERM to SIGKILL at a clean stop."""
TAIL_LINES = 12
TAIL_BYTES = 8192


class EngineHandle(Protocol):
    """The process behind an engine, ours or not."""

    url: str
    owned: bool
    """ours to kill"""

    async def wait(self) -> str:
        """Return when it has ended, with the reason; never for an attached server.

        Raises:
            EngineMisconfigured: another start would end the same way.
        """
        ...

    async def kill(self) -> None:
        """End it now."""
        ...

    async def terminate(self) -> None:
        """End it cleanly, by force after a while."""
        ...


StartEngine = Callable[[str], Awaitable[EngineHandle]]
"""Starts the engine of the given id. Raises GenerationError, within its own deadline."""
StartServer = Callable[[Config, EngineKeys, Path, Mapping[str, str]], Awaitable[EngineHandle]]
"""Starts a server as the configuration says, that asks for the keys, writes to the log and has the
environment variables. It need not answer yet. Raises GenerationError, within its own deadline."""


class OwnedEngine:
    """An engine process that this generator started; it leads a session of its own.

    Attributes:
        pid: of the process.

    Args:
        process: just started.
        url: where it will listen.
        log: what it writes to.
        log_start: bytes that were in it before.
        held: closed when the process has ended.
    """

    owned = True

    def __init__(
        self, process: Process, url: str, log: Path, *, log_start: int = 0, held: ExitStack
    ) -> None:
        self._process = process
        self.pid = process.pid
        self.url = url
        self._log = log
        self._log_start = log_start
        self._held = held
        self._drain = asyncio.create_task(_drain(process.stdout))

    async def wait(self) -> str:
        """Wait for the process to end; its exit code and its last words.

        Raises:
            EngineMisconfigured: it ended with exit code 2.
        """
        code = await self._process.wait()
        ended = why_ended("its process ended", code, self._log, self._log_start)
        if isinstance(ended, EngineMisconfigured):
            raise ended
        return str(ended)

    async def kill(self) -> None:
        """SIGKILL to the process and its children."""
        signal_group(self._process, signal.SIGKILL)
        await self._process.wait()
        await self._drain
        self._held.close()

    async def terminate(self) -> None:
        """SIGTERM, and SIGKILL `TERMINATE_S` later."""
        signal_group(self._process, signal.SIGTERM)
        try:
            async with asyncio.timeout(TERMINATE_S):
                await self._process.wait()
        except TimeoutError:
            logger.warning("engine process %d ignores SIGTERM; killing it", self.pid)
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


async def _drain(stream: asyncio.StreamReader | None) -> None:
    """Keep the pipe empty until its end: a full one would stop the writer."""
    while stream is not None and await stream.read(1 << 16):
        pass


def signal_group(process: Process, number: signal.Signals) -> None:
    """Signal the process and its children: it leads its own session."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # has ended


def why_ended(what: str, code: int, log: Path, log_start: int) -> GenerationError:
    """The error of a process that ended with `code`; EngineMisconfigured if it will again.

    Exit code 2 is ours for a wrong configuration, and every argument parser's for wrong flags. Its
    cause comes first, since some readers show one line only.
    """
    lines = _last_lines(log, log_start)
    tail = "\n    ".join([f"the end of {log}:", *lines]) if lines else f"{log} says nothing"
    if code == ExitCode.CONFIG:
        cause = f": {lines[-1].strip()}" if lines else ""
        return EngineMisconfigured(f"{what} (exit code {code}, configuration){cause}; {tail}")
    return GenerationError(f"{what} (exit code {code}); {tail}", retryable=True)


def _last_lines(log: Path, start: int) -> list[str]:
    """What `log` says at its end, after byte `start`."""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - TAIL_BYTES))
        return file.read().decode(errors="replace").rstrip().splitlines()[-TAIL_LINES:]
