"""The generator as a process: a real replay server, an attached fake engine, SIGTERM, kill -9."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from async_grpo.config.engine import EngineSection
from async_grpo.config.load import load_config, to_yaml
from async_grpo.config.policy import PolicySection
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.task import TaskSection
from async_grpo.engine_api import Path as Route
from async_grpo.errors import ConfigError
from async_grpo.replay_parts import CellPhase
from async_grpo.roles.generator import main
from async_grpo.types import WeightsName
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.replay_harness import (
    STATUS,
    at_address,
    open_update,
    replay_config,
    serving,
    training,
)


def save_model(directory):
    """A tokenizer of letters; the fake engine needs no more of a model."""
    directory.mkdir()
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"abcdefgh>"])}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 11}))
    (directory / "model.safetensors").touch()  # its presence is checked, its content by engines
    return str(directory)


@asynccontextmanager
async def generator_process(config, directory):
    """`async-grpo generator` as a child of this test."""
    path = directory / "config.yaml"
    path.write_text(to_yaml(config))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "async_grpo", "generator", str(path), "--name", "g0",
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            _, log = await process.communicate()
            print(log.decode())


async def publish(trainer, weights):
    """A whole update, as the trainer does it."""
    sequence, cell_id, engine_id = await open_update(trainer, 1, weights)
    reached = await trainer.wait_cell(sequence, cell_id, CellPhase.COMMITTED, timeout_s=20)
    assert reached.phases == {engine_id: CellPhase.COMMITTED}


async def test_a_generator_process_works_until_sigterm(tmp_path):
    config = replace(
        replay_config(tmp_path / "run", group_size=4),
        policy=PolicySection(model=save_model(tmp_path / "model")),
        task=TaskSection(name="reverse", reward="tests.fakes.bad_rewards:by_length"),
    )
    path = tmp_path / "of-the-server.yaml"
    path.write_text(to_yaml(config))
    config = load_config(path)  # as the other process does: what follows from it is filled in
    async with FakeEngine(vocab_size=11) as engine, serving(config) as server:
        config = replace(
            at_address(config, server.address), engine=EngineSection(urls=[engine.url])
        )
        async with generator_process(config, tmp_path) as process, training(config) as trainer:
            started = await trainer.start(0)
            await engine.until(lambda: engine.num_calls(Route.SERVER_INFO) > 0, timeout_s=40)
            beating = asyncio.create_task(_beat(trainer))
            weights = WeightsName(started.incarnation, 0)
            while not (await trainer.draw(1, 0)).wishes:
                pass
            await publish(trainer, weights)
            drawn = []
            while not drawn:
                drawn = (await trainer.draw(1, 0)).groups
            group = await trainer.fetch(drawn[0].group_id, drawn[0].attempt)
            assert group.generator == "g0"
            assert group.oldest_weights() == weights
            process.send_signal(signal.SIGTERM)
            _, log = await process.communicate()
            assert process.returncode == 0, log.decode()
            beating.cancel()
    lines = RunDirectory(tmp_path / "run").generator_log("g0").read_text().splitlines()
    sent = {json.loads(line)["group_id"] for line in lines if '"sent"' in line}
    assert {leased.group_id for leased in drawn} <= sent


async def _beat(trainer):
    """The trainer holds draw 1."""
    while True:
        await trainer.heartbeat([1], STATUS)
        await asyncio.sleep(0.2)


def test_port_0_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"replay\.address"):
        main(replay_config(tmp_path), name="g0", config_args=[])


HANGING_POOL = """
import asyncio
from async_grpo.tasks.reward_pool import ProcessRewardPool
from async_grpo.types import Prompt
from tests.fakes import bad_rewards

async def score():
    pool = ProcessRewardPool(bad_rewards.tell_pid_and_hang, workers=1, timeout_s=600.0)
    await pool.score(["x"], Prompt(index=0, text="", token_ids=[1], answer=""))

if __name__ == "__main__":
    asyncio.run(score())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is signalled on Linux")
def test_a_hanging_reward_does_not_outlive_a_killed_generator(tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(HANGING_POOL)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended, _, _ = select.select([worker], [], [], 20.0)
        assert ended, "the worker hangs on"
        os.close(worker)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
