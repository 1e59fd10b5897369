"""Calls whose connection breaks: a server that closes it instead of answering."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.engine_api import Path as Route
from async_grpo.engine_api import PauseMode
from async_grpo.errors import GenerationError
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.connections import NUM_REPEATS, BrokenConnection, Connections

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """Closes the connection of the first `num_broken` calls, then answers."""

    def __init__(self, num_broken):
        self.num_broken = num_broken
        self.num_calls = 0

    async def serve(self, reader, writer):
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.num_calls += 1
                if self.num_calls <= self.num_broken:
                    break
                writer.write(OK)
        except asyncio.IncompleteReadError:
            pass  # the client has closed it
        finally:
            writer.close()


@asynccontextmanager
async def breaking(num_broken):
    server = Server(num_broken)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server, url
    finally:
        listener.close()
        await listener.wait_closed()


async def test_what_may_arrive_twice_is_sent_again():
    async with breaking(NUM_REPEATS) as (server, url):
        client = HttpEngineClient(url, control_timeout_s=5.0)
        await client.flush_cache()
        assert server.num_calls == NUM_REPEATS + 1
        await client.close()


async def test_it_is_not_sent_for_ever():
    async with breaking(99) as (server, url):
        client = HttpEngineClient(url, control_timeout_s=5.0)
        with pytest.raises(BrokenConnection) as caught:
            await client.flush_cache()
        assert caught.value.retryable
        assert server.num_calls == NUM_REPEATS + 1
        await client.close()


async def test_what_must_not_arrive_twice_is_sent_once():
    """A request that samples, a session, a bucket: nobody knows what became of the first."""
    async with breaking(99) as (server, url):
        client = HttpEngineClient(url, control_timeout_s=5.0)
        with pytest.raises(BrokenConnection):
            await client.begin_update()
        assert server.num_calls == 1
        await client.close()


async def test_nobody_there_is_no_broken_connection():
    connections = Connections("http://127.0.0.1:9", EngineKeys())
    with pytest.raises(GenerationError) as caught:
        await connections.call("POST", Route.PAUSE, {"mode": PauseMode.RETRACT}, 5.0)
    assert not isinstance(caught.value, BrokenConnection)
    assert caught.value.retryable
    await connections.close()
