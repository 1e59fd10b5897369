"""The replay server's process."""

import asyncio
import logging
import os
import signal
from pathlib import Path

from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.replay.server import ReplayServer

logger = logging.getLogger(__name__)


def main(config: Config) -> None:
    """Serve until SIGTERM, or until the run is finished and its peers have left.

    Raises:
        ConfigError: `replay.address` cannot be bound.
        AsyncGrpoError: the ledger is in use, or is not one.
    """
    asyncio.run(_serve(config))


async def _serve(config: Config) -> None:
    server = ReplayServer(config)
    try:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop, "SIGTERM")
        _tell_address(RunDirectory(Path(config.run.output_dir)).bound_address, server.address)
        await server.serve()
    finally:
        server.close()


def _tell_address(path: Path, address: str) -> None:
    """Write the address in one piece: a reader sees all of it or no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(address + "\n", encoding="utf-8")
    os.replace(partial, path)
