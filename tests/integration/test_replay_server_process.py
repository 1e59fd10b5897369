"""The replay server as a process of its own: its address, its signals, its death."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from async_grpo.config.load import to_yaml
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.replay.generator_client import GeneratorClient
from async_grpo.replay.monitor_client import MonitorClient
from async_grpo.replay.trainer_client import TrainerClient
from async_grpo.types import InsertOutcome
from tests.fakes.replay_harness import DATASET, at_address, go_live, group_for, replay_config

PROGRAM = """
import sys
from async_grpo.config.load import load_config
from async_grpo.roles.replay_server import main
assert "torch" not in sys.modules and "transformers" not in sys.modules
main(load_config(sys.argv[1]))
"""


@contextmanager
def server_process(config: Config, root: Path):
    """The role in a process that is gone after the block."""
    path = root / "given.yaml"
    path.write_text(to_yaml(config))
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)])
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=20)


async def address_of(process: "subprocess.Popen[bytes]", root: Path) -> str:
    path = RunDirectory(root).bound_address
    async with asyncio.timeout(30):
        while not path.exists():
            assert process.poll() is None, "the server ended before it listened"
            await asyncio.sleep(0.02)
    return path.read_text().strip()


async def test_sigterm_ends_it_cleanly(tmp_path):
    config = replay_config(tmp_path)
    with server_process(config, tmp_path) as process:
        config = at_address(config, await address_of(process, tmp_path))
        monitor = MonitorClient(config)
        await monitor.connect()
        assert (await monitor.stats()).tickets == 0
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        await monitor.close()


async def test_kill_9_in_the_middle_goes_unnoticed(tmp_path):
    config = replay_config(tmp_path)
    with server_process(config, tmp_path) as process:
        config = at_address(config, await address_of(process, tmp_path))
        generator = GeneratorClient(config, name="g0", dataset=DATASET)
        trainer = TrainerClient(config)
        await generator.connect()
        await trainer.connect()
        weights = await go_live(trainer, generator)
        tickets = [await generator.claim() for _ in range(3)]
        assert all(tickets)
        assert await generator.insert(group_for(tickets[0], weights)) is InsertOutcome.STORED
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait, 20)
        inserting = asyncio.create_task(generator.insert(group_for(tickets[1], weights)))
    with server_process(config, tmp_path):
        async with asyncio.timeout(30):
            assert await inserting is InsertOutcome.STORED
            # the group that died with the server is made again, as another attempt
            monitor = MonitorClient(config)
            await monitor.connect()
            stats = await monitor.stats()
            assert (stats.reissued, stats.stored, stats.claimed) == ({"lost": 1}, 1, 1)
            assert (await trainer.start(0)).incarnation == weights.incarnation
        for client in (monitor, generator, trainer):
            await client.close()
