"""Connections that break at the worst moment: nothing is lost, nothing is stored twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from async_grpo.replay.generator_client import GeneratorClient
from async_grpo.replay.trainer_client import TrainerClient
from async_grpo.types import InsertOutcome
from tests.fakes.replay_harness import (
    at_address,
    connected,
    go_live,
    group_for,
    replay_config,
    serving,
    training,
)

NUM_TOKENS = 60_000
"""per completion, so that a group is about a megabyte: several reads of a socket"""


class Proxy:
    """A TCP relay that resets each of its first `num_cuts` connections after `cut_after` bytes."""

    def __init__(self, port: int, *, cut_after: int, upstream: bool, num_cuts: int) -> None:
        self.port, self.cut_after, self.upstream = port, cut_after, upstream
        self.cuts_left = num_cuts

    async def relay(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far, far_out = await asyncio.open_connection("127.0.0.1", self.port)
        moved = 0
        broken = asyncio.Event()

        async def pump(
            source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, counts: bool
        ) -> None:
            nonlocal moved
            while data := await source.read(16384):
                moved += len(data) if counts else 0
                if counts and self.cuts_left and moved > self.cut_after:
                    self.cuts_left -= 1
                    break
                sink.write(data)
                await sink.drain()
            broken.set()

        tasks = [
            asyncio.create_task(pump(near, far_out, counts=self.upstream)),
            asyncio.create_task(pump(far, near_out, counts=not self.upstream)),
        ]
        await broken.wait()
        for task in tasks:
            task.cancel()
        for writer in (near_out, far_out):
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def relaying(proxy: Proxy) -> AsyncIterator[str]:
    listener = await asyncio.start_server(proxy.relay, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("num_cuts", [1, 3])
async def test_insert_survives_connections_cut_in_the_middle(tmp_path, num_cuts):
    config = replay_config(tmp_path, num_tokens=NUM_TOKENS)
    async with serving(config) as server:
        config = at_address(config, server.address)
        proxy = Proxy(port_of(server.address), cut_after=300_000, upstream=True, num_cuts=num_cuts)
        async with connected(config) as generator, training(config) as trainer:
            weights = await go_live(trainer, generator)
            ticket = await generator.claim()
            assert ticket is not None
            group = group_for(ticket, weights, num_tokens=NUM_TOKENS)
            async with relaying(proxy) as address:
                generator._config = at_address(config, address)  # only the bulk connection
                assert await generator.insert(group) is InsertOutcome.STORED
                await _close_bulk(generator)
            assert proxy.cuts_left == 0
            assert server._core.stats(0.0).stored == 1


async def test_fetch_survives_a_connection_cut_in_the_middle(tmp_path):
    config = replay_config(tmp_path, num_tokens=NUM_TOKENS)
    async with serving(config) as server:
        config = at_address(config, server.address)
        proxy = Proxy(port_of(server.address), cut_after=300_000, upstream=False, num_cuts=2)
        async with connected(config) as generator, training(config) as trainer:
            weights = await go_live(trainer, generator)
            for _ in range(2):
                ticket = await generator.claim()
                assert ticket is not None
                await generator.insert(group_for(ticket, weights, num_tokens=NUM_TOKENS))
            drawn = await trainer.draw(1, 0)
            async with relaying(proxy) as address:
                trainer._config = at_address(config, address)
                for leased in drawn.groups:
                    group = await trainer.fetch(leased.group_id, leased.attempt)
                    assert group.num_tokens == 2 * NUM_TOKENS
                await _close_bulk(trainer)
            assert proxy.cuts_left == 0


async def _close_bulk(client: GeneratorClient | TrainerClient) -> None:
    link = client._bulk_link
    assert link is not None
    await link.close()
