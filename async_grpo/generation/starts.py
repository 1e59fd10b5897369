"""How each engine slot gets its engine: attached, or started as the configuration says.

The embedded engine prints its address once it listens. SGLang (`sglang_server`) gets one.
`engine.kind` may name others.
"""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from async_grpo.config.engine import LOOPBACK, EngineKind, EngineSection
from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.load import resolve_object
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.devices.cards import VARIABLE, look_up_all, place_engines
from async_grpo.errors import GenerationError
from async_grpo.generation.handles import (
    AttachedEngine,
    EngineHandle,
    OwnedEngine,
    StartEngine,
    StartServer,
    signal_group,
    why_ended,
)
from async_grpo.generation.sglang_server import require_interpreter, start_sglang
from async_grpo.transport.parent import start_child_async
from async_grpo.weights.addresses import is_own_address

logger = logging.getLogger(__name__)


def engine_starts(
    config: Config, name: str, config_args: Sequence[str], keys: EngineKeys
) -> list[StartEngine]:
    """How each engine slot of generator `name` gets its engine.

    Args:
        config: `engine.urls` are attached to; without any, `engine.num_engines` are started.
        name: of the generator.
        config_args: the command line's CONFIG and overrides, passed on to embedded engines.
        keys: that servers ask for; embedded ones find them by themselves.

    Raises:
        ConfigError: `engine.python` cannot be run, `engine.kind` not be imported, or there are too
            few cards.
    """
    section = config.engine
    if section.urls:
        return [partial(_attach, url) for url in section.urls]
    if not section.host.startswith(LOOPBACK) and not (keys.api or keys.admin):
        logger.warning(
            "engines listen on %s without a key: whoever reaches them can replace their weights; "
            "set engine.api_key_file and engine.admin_api_key_file",
            section.host,
        )
    directory = RunDirectory(Path(config.run.output_dir))
    logs = [directory.role_log(f"{name}.engine{slot}") for slot in range(section.num_engines)]
    start = _starter(section, config_args)
    cards = dict(enumerate(cards_of_engines(config)))
    return [
        partial(_start, start, config, keys, log, engine_environment(section, cards.get(slot)))
        for slot, log in enumerate(logs)
    ]


def cards_of_engines(config: Config) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine of a generator here; empty: as the generator's own.

    Raises:
        ConfigError: a card is not there, or there are too few.
    """
    (device_ids,) = place_engines(
        config, os.environ, trainer_here=is_own_address(config.weights.host)
    )
    return look_up_all(device_ids, config.engine, os.environ)


def _starter(section: EngineSection, config_args: Sequence[str]) -> StartServer:
    if section.kind == EngineKind.sglang:
        require_interpreter(section)
        return start_sglang
    if section.kind == EngineKind.embedded:
        return partial(_start_embedded, config_args)
    found: StartServer = resolve_object(section.kind, "engine.kind")
    return found


def engine_environment(section: EngineSection, devices: str | None = None) -> dict[str, str]:
    """Environment variables of an engine.

    Args:
        section: the variables that it names.
        devices: its cards as CUDA_VISIBLE_DEVICES; None: those of this process.
    """
    cards = {} if devices is None else {VARIABLE: devices}
    return {**os.environ, **section.environment, **cards}


async def _attach(url: str, engine_id: str) -> EngineHandle:
    logger.info("engine %s: attaching to %s", engine_id, url)
    return AttachedEngine(url)


async def _start(
    start: StartServer,
    config: Config,
    keys: EngineKeys,
    log: Path,
    env: Mapping[str, str],
    engine_id: str,
) -> EngineHandle:
    kind, cards = config.engine.kind, env.get(VARIABLE)
    on = f" on card {cards}" if cards else ""
    logger.info("engine %s: starting (%s)%s; its log is %s", engine_id, kind, on, log)
    return await start(config, keys, log, env)


async def _start_embedded(
    config_args: Sequence[str], config: Config, keys: EngineKeys, log: Path, env: Mapping[str, str]
) -> EngineHandle:
    args = [sys.executable, "-m", "async_grpo", "engine", *config_args, "engine.port=0"]
    return await start_announced(args, log, env=env, timeout_s=config.engine.start_timeout_s)


async def start_announced(
    args: Sequence[str], log: Path, *, env: Mapping[str, str], timeout_s: float
) -> OwnedEngine:
    """Start an engine process; it prints `{"url": ...}` once it listens.

    Args:
        args: the command.
        log: file for what it prints besides; appended to.
        env: its environment.
        timeout_s: deadline for that line.

    Raises:
        GenerationError: it ended, or printed no such line in time. EngineMisconfigured: it ended
            because of its configuration.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stderr:
        log_start = stderr.tell()
        process = await start_child_async(args, env=env, stdout=PIPE, stderr=stderr)
    try:
        url = await _first_line_url(process, timeout_s)
    except BaseException as error:  # cancelled too: nobody else knows this process
        signal_group(process, signal.SIGKILL)
        code = await process.wait()
        if isinstance(error, GenerationError):
            raise why_ended(str(error), code, log, log_start) from error
        raise
    return OwnedEngine(process, url, log, log_start=log_start, held=ExitStack())


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
