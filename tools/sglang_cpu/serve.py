"""Serve a model directory with a real, unmodified SGLang on this machine's CPU.

    make sglang-env
    .venv/bin/python tools/sglang_cpu/serve.py MODEL_DIR [engine.field=value ...]

Starts it as a generator would, with the `engine` section of configs/sglang_cpu.yaml. Prints one
line, `{"url": ...}`, once the server is ready, and serves until SIGTERM or Ctrl-C. Keys come from
where that section says, or from the environment, as for every engine.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from async_grpo.config.engine_keys import load_engine_keys
from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.errors import AsyncGrpoError, ConfigError, ExitCode, GenerationError
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.handles import OwnedEngine
from async_grpo.generation.sglang_server import require_interpreter, start_sglang
from async_grpo.generation.starts import engine_environment
from async_grpo.transport.parent import exit_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"
CONFIG = REPOSITORY / "configs" / "sglang_cpu.yaml"
DEFAULT_LOG = Path("runs") / "sglang_cpu.log"
BIND = "SGLANG_CPU_OMP_THREADS_BIND"
"""Cores of each tensor-parallel rank. SGLang wants a NUMA node for each, or to be told."""
READY_RETRY_S = 0.2


def main(args: Sequence[str] | None = None) -> int:
    """An exit code as of `async-grpo`."""
    exit_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("overrides", nargs="*", metavar="engine.field=value")
    parser.add_argument("--log", type=Path, default=DEFAULT_LOG, help="of the server")
    options = parser.parse_intermixed_args(args)
    try:
        config = serving_config(options.model, options.overrides)
        require_interpreter(config.engine)
        return asyncio.run(_serve(config, options.log))
    except AsyncGrpoError as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG if isinstance(error, ConfigError) else ExitCode.PEER
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def serving_config(model: Path, overrides: Sequence[str]) -> Config:
    """The configuration that serves `model`; `overrides` win."""
    # a context as long as the model's: the example's is cut for its task
    ours = [f"policy.model={model}", f"engine.python={PYTHON}", "engine.context_length=0"]
    config = load_config(CONFIG, [*ours, *overrides])
    if config.engine.tensor_parallel_size > 1 and BIND not in config.engine.environment:
        cores = sorted(os.sched_getaffinity(0))
        ranks = range(config.engine.tensor_parallel_size)
        config.engine.environment[BIND] = "|".join(str(cores[i % len(cores)]) for i in ranks)
    return config


async def _serve(config: Config, log: Path) -> int:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    keys = load_engine_keys(config.engine)
    server = await start_sglang(config, keys, log, engine_environment(config.engine))
    client = HttpEngineClient(
        server.url, control_timeout_s=config.engine.control_timeout_s, keys=keys
    )
    ended = asyncio.create_task(server.wait())
    stopped = asyncio.create_task(stop.wait())
    try:
        async with asyncio.timeout(config.engine.start_timeout_s):
            await _until_ready(client, server, ended, stopped)
        if not stopped.done():
            print(json.dumps({"url": server.url}), flush=True)
        await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done():
            raise GenerationError(ended.result(), retryable=False)
        return ExitCode.OK
    except TimeoutError as error:
        raise GenerationError(
            f"SGLang was not ready within {config.engine.start_timeout_s:g} s; see {log}",
            retryable=False,
        ) from error
    finally:
        stopped.cancel()
        await client.close()
        await server.terminate()


async def _until_ready(
    client: HttpEngineClient,
    server: OwnedEngine,
    ended: "asyncio.Task[str]",
    stopped: "asyncio.Task[bool]",
) -> None:
    """Until it takes requests, or we are told to stop.

    Raises:
        GenerationError: it ended.
    """
    while True:
        try:
            if await client.ready():
                return
        except GenerationError as error:
            if not error.retryable:
                raise
        waits = [ended, stopped]
        done, _ = await asyncio.wait(
            waits, timeout=READY_RETRY_S, return_when=asyncio.FIRST_COMPLETED
        )
        if stopped in done:
            return
        if ended in done:
            raise GenerationError(ended.result(), retryable=False)


if __name__ == "__main__":
    sys.exit(main())
