"""Start SGLang as a program of its own, in its own environment; it is never imported here.

Knows SGLang's command line; nothing of its API, of when it is ready, or of restarts.
"""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from yarl import URL

from async_grpo.config.engine import RAW_LOGPROBS, EngineSection
from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.policy import DType
from async_grpo.config.schema import Config
from async_grpo.engine_api import SGLANG_RESERVE
from async_grpo.errors import ConfigError, GenerationError
from async_grpo.generation.handles import OwnedEngine
from async_grpo.transport.parent import CHILD_VARIABLE, start_child_async

UNTIL_PARENT_ENDS = f"""
unset {CHILD_VARIABLE}
keys=$1
shift
exec 3<&0
{{ trap "" TERM; cat <&3 >/dev/null; rm -f "$keys"; kill -KILL 0; }} &
exec "$@" 3<&- </dev/null
"""
"""SGLang takes no notice of its parent's death. A second process in its group does: it reads the
parent's pipe (`transport.parent`) and at its end removes the file with the keys and kills the
group. It outlives SIGTERM, which is for the server."""
_LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
"""Variable of SGLang without which it ends where its context is longer than the model's."""
_OF_OUR_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that would make another interpreter find our packages."""


def require_interpreter(section: EngineSection) -> None:
    """Refuse an `engine.python` that is not there.

    Raises:
        ConfigError: says what to do.
    """
    if shutil.which(section.python) is None:
        raise ConfigError(
            f"engine.python: {section.python!r} is no program; name the interpreter of the "
            "environment that SGLang is installed in (docs/sglang.md tells how to make one)"
        )


def sglang_args(config: Config, port: int) -> list[str]:
    """The command that serves `engine.model` on `port`; keys and variables apart."""
    section = config.engine
    args = [
        section.python, "-m", "sglang.launch_server",
        "--model-path", section.model or config.policy.model,
        "--host", section.host, "--port", str(port),
        "--dtype", config.policy.dtype.value,
        "--tp-size", str(section.tensor_parallel_size),
        "--max-running-requests", str(section.max_running_requests),
        "--log-level-http", "warning",  # or every request and heartbeat is a line in the log
    ]  # fmt: skip
    if config.trainer.fp32_head and config.policy.dtype is DType.bfloat16:
        args.append("--enable-fp32-lm-head")  # logits are not rounded, as in the trainer
    if section.context_length:
        # so that engine.context_length means prompt and completion together, as everywhere else
        args += ["--context-length", str(section.context_length + SGLANG_RESERVE)]
    return [*args, *section.server_args]


def server_variables(section: EngineSection, env: Mapping[str, str]) -> dict[str, str]:
    """`env` without what would make another interpreter find our packages."""
    ours = set(_OF_OUR_ENVIRONMENT) - set(section.environment)
    return {name: value for name, value in env.items() if name not in ours}


async def start_sglang(
    config: Config, keys: EngineKeys, log: Path, env: Mapping[str, str]
) -> OwnedEngine:
    """Start a server; returns at once, long before it answers.

    Args:
        config: what to serve and how.
        keys: that it is to ask for.
        log: file for what it prints; appended to.
        env: its environment, but for the variables of ours.

    Raises:
        GenerationError: no port is free, or the program cannot be started.
    """
    env = server_variables(config.engine, env) | {RAW_LOGPROBS: "0"}
    if _only_reserve_exceeds(config):
        env[_LONGER_CONTEXT] = "1"
    with ExitStack() as stack:
        port = stack.enter_context(_reserved_port(config.engine.host)).getsockname()[1]
        args, key_file = sglang_args(config, port), ""
        if keys.api or keys.admin:
            key_file = str(stack.enter_context(_KeyFile(keys)).path)
            args += ["--config", key_file]
        try:
            with _open_log(log, private=bool(keys.api or keys.admin)) as output:
                log_start = output.tell()
                process = await start_child_async(
                    ["/bin/sh", "-c", UNTIL_PARENT_ENDS, "sglang", key_file, *args],
                    env=env,
                    stdout=output,
                    stderr=output,
                )
        except OSError as error:
            raise GenerationError(f"cannot start SGLang: {error}", retryable=True) from error
        host = config.engine.host
        url = str(URL.build(scheme="http", host=host, port=port))
        return OwnedEngine(process, url, log, log_start=log_start, held=stack.pop_all())


def _only_reserve_exceeds(config: Config) -> bool:
    """Whether the model holds the context that was asked for, but not SGLang's reserve behind it.

    No token ever stands there, so SGLang may be told to accept it.
    """
    section = config.engine
    path = Path(section.model or config.policy.model) / "config.json"
    if not section.context_length or not path.is_file():
        return False
    longest = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    return isinstance(longest, int) and (
        section.context_length <= longest < section.context_length + SGLANG_RESERVE
    )


def _open_log(log: Path, *, private: bool) -> BinaryIO:
    """SGLang writes its arguments to its log, keys included."""
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    return os.fdopen(os.open(log, flags, 0o600 if private else 0o666), "ab")


def _reserved_port(host: str) -> socket.socket:
    """A socket that keeps a free port from others until it is closed.

    SGLang takes no port 0, and binds only when its model is loaded. A socket that does not listen
    lets it bind all the same: both allow the reuse of the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, 0))
    except OSError as error:
        reserved.close()
        raise GenerationError(
            f"engine.host: no port to listen on at {host!r}: {error}", retryable=True
        ) from error
    return reserved


class _KeyFile:
    """Keys in a file that only we can read: on the command line everybody could."""

    def __init__(self, keys: EngineKeys) -> None:
        self._keys = {"api-key": keys.api, "admin-api-key": keys.admin}
        self.path = Path()

    def __enter__(self) -> "_KeyFile":
        descriptor, name = tempfile.mkstemp(prefix="engine-keys-", suffix=".yaml")
        self.path = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            # JSON is YAML
            json.dump({name: key for name, key in self._keys.items() if key}, file)
        return self

    def __exit__(self, *error: object) -> None:
        self.path.unlink(missing_ok=True)
