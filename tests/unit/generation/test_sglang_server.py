"""Starting SGLang, with a program in its place that tells how it was started."""

import asyncio
import json
import os
import socket
import stat
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from async_grpo.config.engine import EngineSection
from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.policy import DType, PolicySection
from async_grpo.config.run import RunSection
from async_grpo.config.schema import Config
from async_grpo.config.task import TaskSection
from async_grpo.errors import ConfigError
from async_grpo.generation.sglang_server import sglang_args
from async_grpo.generation.starts import engine_starts
from async_grpo.transport.parent import CHILD_VARIABLE

SERVER = """#!{python}
import json, os, pathlib, signal, socket, subprocess, sys
here = pathlib.Path({here!r})
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
args = sys.argv[1:]
said = {{"args": args, "env": dict(os.environ)}}
if "--config" in args:
    keys = pathlib.Path(args[args.index("--config") + 1])
    said |= {{"keys": keys.read_text(), "mode": keys.stat().st_mode}}
listener = socket.create_server(("127.0.0.1", int(args[args.index("--port") + 1])))
print("loading", flush=True)
if "--bad" in args:
    sys.exit("no kernel image is available")
with (here / "alive").open("w") as alive:
    # like SGLang's scheduler; the file ends when both have ended
    subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, pass_fds=[alive.fileno()])
    (here / "said.json").write_text(json.dumps(said))
    with (here / "started").open("w") as started:
        started.write("x")
    signal.pause()
"""


class Place:
    """A directory with the stand-in for SGLang's interpreter, and what it says."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "python"

    def make(self) -> None:
        self.python.write_text(SERVER.format(python=sys.executable, here=str(self.directory)))
        self.python.chmod(0o755)
        for name in ("alive", "started"):
            os.mkfifo(self.directory / name)

    def config(self, **engine: object) -> Config:
        return Config(
            run=RunSection(output_dir=str(self.directory / "out"), num_train_steps=1),
            policy=PolicySection(model="the-policy"),
            task=TaskSection(name="reverse"),
            engine=EngineSection(**{"kind": "sglang", "python": str(self.python)} | engine),
        )

    async def started(self) -> dict:
        """Wait until it is up; what it was started with."""
        await asyncio.to_thread((self.directory / "started").read_text)
        return json.loads((self.directory / "said.json").read_text())

    async def ended(self) -> None:
        """Wait until it is gone."""
        await asyncio.to_thread((self.directory / "alive").read_text)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.make()
    return made


@asynccontextmanager
async def running(place: Place, keys: EngineKeys, **engine: object):
    """(handle, what it was started with)"""
    (start,) = engine_starts(place.config(**engine), "gen", [], keys)
    handle = await start("gen/0#1")
    # opened before it writes, so that the fifo has a reader
    ended = asyncio.create_task(place.ended())
    try:
        yield handle, await place.started()
    finally:
        await handle.kill()
        await ended


async def test_the_command_says_everything_that_the_configuration_does(place, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    engine = {
        "model": "a-copy", "tensor_parallel_size": 2, "context_length": 99,
        "max_running_requests": 5, "device_ids": ["6,7"], "environment": {"NCCL_DEBUG": "INFO"},
        "server_args": ["--mem-fraction-static", "0.8"],
    }  # fmt: skip
    async with running(place, EngineKeys(), **engine) as (handle, said):
        port = handle.url.rpartition(":")[2]
        assert said["args"] == [
            "-m", "sglang.launch_server", "--model-path", "a-copy", "--host", "127.0.0.1",
            "--port", port, "--dtype", "float32", "--tp-size", "2", "--max-running-requests", "5",
            "--log-level-http", "warning", "--context-length", "105",
            "--mem-fraction-static", "0.8",
        ]  # fmt: skip
        assert said["env"]["CUDA_VISIBLE_DEVICES"] == "6,7"
        assert said["env"]["NCCL_DEBUG"] == "INFO"
        assert not {"PYTHONPATH", "VIRTUAL_ENV", CHILD_VARIABLE} & set(said["env"])
        assert said["env"]["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
        assert handle.owned


async def test_by_default_it_loads_the_policys_model(place):
    async with running(place, EngineKeys()) as (_, said):
        assert said["args"][said["args"].index("--model-path") + 1] == "the-policy"
        assert "--config" not in said["args"]


@pytest.mark.parametrize(
    ("dtype", "fp32_head", "passed"),
    [(DType.bfloat16, True, True), (DType.bfloat16, False, False), (DType.float32, True, False)],
)
def test_the_server_makes_logits_as_the_trainer_does(place, dtype, fp32_head, passed):
    config = place.config()
    config.policy.dtype, config.trainer.fp32_head = dtype, fp32_head
    assert ("--enable-fp32-lm-head" in sglang_args(config, 1)) is passed


async def test_keys_are_in_a_file_of_ours_and_not_in_the_command(place):
    async with running(place, EngineKeys("of-all", "of-admins")) as (_, said):
        assert json.loads(said["keys"]) == {"api-key": "of-all", "admin-api-key": "of-admins"}
        assert stat.S_IMODE(said["mode"]) == 0o600
        assert not any("of-a" in argument for argument in said["args"])
        log = place.directory / "out" / "logs" / "gen.engine0.log"
        assert stat.S_IMODE(log.stat().st_mode) == 0o600, "SGLang logs its arguments"
    key_file = said["args"][said["args"].index("--config") + 1]
    with pytest.raises(FileNotFoundError):
        os.stat(key_file)


async def test_its_port_is_kept_from_others_and_free_for_it(place):
    async with running(place, EngineKeys()) as (handle, _):
        host, port = handle.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5):
            pass
    (start,) = engine_starts(place.config(server_args=["--bad"]), "gen", [], EngineKeys())
    handle = await start("gen/0#2")
    await handle.wait()
    port = int(handle.url.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    await handle.kill()
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_a_server_that_ends_says_why(place):
    (start,) = engine_starts(place.config(server_args=["--bad"]), "gen", [], EngineKeys())
    for _ in range(2):
        handle = await start("gen/0#1")
        reason = await handle.wait()
        await handle.kill()
    assert reason.startswith("its process ended (exit code 1); the end of ")
    assert "gen.engine0.log" in reason
    assert reason.endswith("loading\n    no kernel image is available")
    assert reason.count("loading") == 1, "of this life only"


async def test_a_clean_stop_is_the_servers_own(place):
    async with running(place, EngineKeys()) as (handle, _):
        await handle.terminate()
        assert "(exit code 7)" in await handle.wait()


async def test_it_ends_with_its_generator_however_that_ends(place):
    """SGLang takes no notice of its parent, and would hold its devices for ever."""
    program = """
import asyncio, pathlib, sys
from tests.unit.generation.test_sglang_server import EngineKeys, Place, engine_starts
async def main():
    config = Place(pathlib.Path(sys.argv[1])).config()
    (start,) = engine_starts(config, "gen", [], EngineKeys("a-key"))
    handle = await start("gen/0#1")
    await handle.wait()
asyncio.run(main())
"""
    generator = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(place.directory)
    )
    ended = asyncio.create_task(place.ended())
    said = await place.started()
    generator.kill()
    await generator.wait()
    async with asyncio.timeout(20):
        await ended
    with pytest.raises(FileNotFoundError):
        os.stat(said["args"][-1])


def test_an_interpreter_that_is_not_there_is_named(place):
    place.python.unlink()
    with pytest.raises(ConfigError, match=r"engine\.python: .*is no program; name the interp"):
        engine_starts(place.config(), "gen", [], EngineKeys())


def test_engines_that_everybody_reaches_without_a_key_are_warned_of(place, caplog):
    engine_starts(place.config(host="0.0.0.0"), "gen", [], EngineKeys("a"))
    assert caplog.text == ""
    engine_starts(place.config(host="0.0.0.0"), "gen", [], EngineKeys())
    assert "engines listen on 0.0.0.0 without a key" in caplog.text


@pytest.mark.parametrize(("longest", "told"), [(104, "1"), (105, None), (98, None)])
async def test_a_context_as_long_as_the_models_leaves_room_for_sglangs_reserve(
    place, longest, told
):
    """One that is longer than the model's is refused by SGLang itself, as before."""
    model = place.directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": longest}))
    async with running(place, EngineKeys(), model=str(model), context_length=99) as (_, said):
        pass
    assert said["args"][said["args"].index("--context-length") + 1] == "105"
    assert said["env"].get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") == told
