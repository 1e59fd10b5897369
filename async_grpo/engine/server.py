"""`async-grpo engine`: serve the embedded engine until SIGTERM or until it cannot decode."""

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from aiohttp import web
from yarl import URL

from async_grpo.config.engine import EngineKind
from async_grpo.config.engine_keys import load_engine_keys
from async_grpo.config.schema import Config
from async_grpo.engine.embedded import EmbeddedEngine
from async_grpo.engine.model import LoadedModel, load_model
from async_grpo.engine.routes import make_app
from async_grpo.errors import ConfigError, GenerationError

logger = logging.getLogger(__name__)


def main(config: Config, *, port: int) -> None:
    """Serve on `config.engine.host`; prints `{"url": ...}` to stdout once it listens.

    Args:
        config: the loaded configuration.
        port: 0 for one that the system chooses.

    Raises:
        ConfigError: the model does not load or does not fit, a key cannot be read, or another
            engine is configured.
        GenerationError: the batching loop died, or the port cannot be bound.
    """
    if config.engine.kind != EngineKind.embedded:
        raise ConfigError(
            f"engine.kind: this is the embedded engine, not {config.engine.kind}; generators "
            "start that themselves, or attach to a server that you start (engine.urls)"
        )
    torch.set_num_threads(config.engine.threads)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    asyncio.run(serve(config, load_model(config), port=port, announce=_print_url))


async def serve(
    config: Config, model: LoadedModel, *, port: int, announce: Callable[[str], None]
) -> None:
    """Serve `model` until SIGTERM; `announce` gets the URL once it listens.

    Raises:
        ConfigError: a key cannot be read.
        GenerationError: the batching loop died, or the port cannot be bound.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    keys = load_engine_keys(config.engine)
    engine = EmbeddedEngine(config, model)
    engine.start()
    runner = web.AppRunner(
        make_app(engine, keys), access_log=None, handler_cancellation=True, shutdown_timeout=1.0
    )
    try:
        await runner.setup()
        host = config.engine.host
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise GenerationError(
                f"cannot listen on {host}:{port}: {error}", retryable=False
            ) from error
        url = str(URL.build(scheme="http", host=host, port=runner.addresses[0][1]))
        logger.info("engine serves %s at %s", model.path, url)
        announce(url)
        await _first(stop.wait(), engine.died.wait())
        if engine.failure:
            raise GenerationError(engine.failure, retryable=False)
    finally:
        await runner.cleanup()
        engine.stop()
        loop.remove_signal_handler(signal.SIGTERM)


def _print_url(url: str) -> None:
    sys.stdout.write(json.dumps({"url": url}) + "\n")
    sys.stdout.flush()


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Until one of them ends; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
