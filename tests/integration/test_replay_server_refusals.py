"""What the replay server and its clients refuse: peers, payloads, settings that do not belong."""

import asyncio
import math

import numpy as np
import pytest
import zmq
import zmq.asyncio

from async_grpo.errors import (
    AsyncGrpoError,
    ConfigError,
    PeerLost,
    RemoteError,
    RpcTimeout,
    VersionMismatch,
)
from async_grpo.replay.generator_client import GeneratorClient
from async_grpo.replay.monitor_client import MonitorClient
from async_grpo.replay.server import ReplayServer
from async_grpo.replay.trainer_client import TrainerClient
from async_grpo.replay_api.base import WIRE_VERSION, Error, ErrorCode
from async_grpo.replay_api.generator import Insert, InsertReply
from async_grpo.replay_api.peers import Hello
from async_grpo.replay_parts import Dataset, Role
from async_grpo.transport import envelope
from async_grpo.transport.codec import encode_group
from async_grpo.types import DropReason, InsertOutcome
from tests.fakes.replay_harness import (
    STATUS,
    at_address,
    claimed,
    connected,
    go_live,
    group_for,
    replay_config,
    serving,
    training,
)


async def test_other_configuration_is_refused_with_what_to_do(tmp_path):
    config = replay_config(tmp_path)
    async with serving(config) as server:
        other = at_address(replay_config(tmp_path, groups_per_step=3), server.address)
        client = TrainerClient(other)
        try:
            with pytest.raises(VersionMismatch, match="start every role from the same file"):
                await client.connect()
        finally:
            await client.close()


async def test_other_data_set_is_refused(tmp_path):
    config = replay_config(tmp_path)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config, "g0"):
            other = GeneratorClient(
                config, name="g1", dataset=Dataset(fingerprint="other", num_prompts=100)
            )
            try:
                with pytest.raises(VersionMismatch, match="dataset other of 100"):
                    await other.connect()
            finally:
                await other.close()


async def test_same_name_again_ends_the_first_instance(tmp_path):
    config = replay_config(tmp_path)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config, "twin") as first, connected(config, "twin") as second:
            with pytest.raises(RemoteError, match=r"fenced.*its own name"):
                await first.heartbeat([], [], STATUS)
            await second.heartbeat([], [], STATUS)


async def test_second_trainer_waits_for_the_first_and_then_names_it(tmp_path):
    config = replay_config(tmp_path, heartbeat_s=0.1, peer_timeout_s=0.4)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with training(config) as first, training(config) as second:
            started = await first.start(0)

            async def live_on() -> None:
                while True:
                    await first.heartbeat([], STATUS)
                    await asyncio.sleep(0.1)

            beating = asyncio.create_task(live_on())
            with pytest.raises(PeerLost, match="has a trainer already"):
                await second.start(0)
            beating.cancel()
            assert (await second.start(0)).incarnation == started.incarnation + 1
            with pytest.raises(RemoteError, match=r"fenced|hello_required"):
                await first.ack(0, 1, [])


async def test_group_that_breaks_the_rules_ends_as_invalid_unsent(tmp_path):
    config = replay_config(tmp_path, max_group_bytes=1000)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config) as generator, training(config) as trainer:
            weights = await go_live(trainer, generator)
            oversize = await claimed(generator)
            group = group_for(oversize, weights, num_tokens=8)
            group.rollouts[0].sequences[0].prompt_token_ids = np.zeros(400, dtype=np.int32)
            assert await generator.insert(group) is InsertOutcome.INVALID
            broken = await claimed(generator)
            group = group_for(broken, weights)
            group.rollouts[1].reward = math.nan
            assert await generator.insert(group) is InsertOutcome.INVALID
            assert server._core.stats(0.0).dropped[DropReason.INVALID] == 2
            assert generator._bulk_link is None


async def test_frames_that_lie_are_refused_by_the_server(tmp_path):
    config = replay_config(tmp_path)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config) as generator, training(config) as trainer:
            weights = await go_live(trainer, generator)
            ticket = await claimed(generator)
            frames = encode_group(group_for(ticket, weights))
            reply = await generator._bulk().ask(
                Insert(group_id=ticket.group_id, attempt=ticket.attempt),
                InsertReply,
                payload=[*frames[:2], bytes(len(frames[2]) - 4)],
            )
            assert reply.outcome is InsertOutcome.INVALID
            assert "behavior log-probs" in reply.detail
            other = await claimed(generator)
            reply = await generator._bulk().ask(
                Insert(group_id=other.group_id, attempt=other.attempt),
                InsertReply,
                payload=frames,
            )
            assert reply.outcome is InsertOutcome.INVALID
            assert "in the insert of group" in reply.detail
            assert server.payload_bytes == 0


async def test_role_may_not_do_anothers_work(tmp_path):
    config = replay_config(tmp_path)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config) as generator:
            with pytest.raises(RemoteError, match="generator may not send Ack"):
                await TrainerClient.ack(_trainer_on(generator), 0, 1, [])


def _trainer_on(generator: GeneratorClient) -> TrainerClient:
    """A trainer's requests on a generator's connection."""
    trainer = TrainerClient(generator._config)
    trainer._control = generator._control
    return trainer


async def test_malformed_and_uninvited_messages_leave_honest_peers_alone(tmp_path):
    config = replay_config(tmp_path)
    context = zmq.asyncio.Context()
    raw = context.socket(zmq.DEALER)
    try:
        async with serving(config) as server:
            config = at_address(config, server.address)
            raw.connect(server.address)
            async with connected(config) as generator, training(config) as trainer:
                random = np.random.default_rng(0)
                for size in (0, 1, 17, 3000):
                    await raw.send_multipart([random.bytes(size), random.bytes(40)])
                await raw.send(envelope.encode(5, Insert(group_id=1, attempt=1)))
                _, body = envelope.open_envelope(await asyncio.wait_for(raw.recv(), 10))
                refused = envelope.decode_reply(body)
                assert isinstance(refused, Error)
                assert refused.code is ErrorCode.HELLO_REQUIRED
                weights = await go_live(trainer, generator)
                ticket = await claimed(generator)
                stored = await generator.insert(group_for(ticket, weights))
                assert stored is InsertOutcome.STORED
    finally:
        raw.close(linger=0)
        context.term()


async def test_other_wire_version_in_the_hello_is_refused(tmp_path):
    config = replay_config(tmp_path)
    async with serving(config) as server:
        client = MonitorClient(at_address(config, server.address))
        link = client._control
        hello: Hello = link._hello_request
        assert hello.role is Role.MONITOR
        link._hello_request = Hello(
            role=hello.role,
            name=hello.name,
            instance=hello.instance,
            wire_version=WIRE_VERSION + 1,
            config_digest=hello.config_digest,
            bulk=False,
        )
        try:
            with pytest.raises(VersionMismatch, match="same release"):
                await client.connect()
        finally:
            await client.close()


async def test_absent_server_is_named_after_the_deadline(tmp_path):
    config = at_address(replay_config(tmp_path), "tcp://127.0.0.1:9")
    config.run.no_progress_timeout_s = 0.3
    client = TrainerClient(config)
    try:
        with pytest.raises(RpcTimeout, match=r"replay server at tcp://127\.0\.0\.1:9 .*'Hello'"):
            await client.connect()
    finally:
        await client.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*"])
def test_clients_refuse_an_address_that_names_no_port(tmp_path, address):
    with pytest.raises(ConfigError, match=r"replay\.address"):
        TrainerClient(at_address(replay_config(tmp_path), address))


async def test_second_server_on_one_ledger_is_refused(tmp_path):
    config = replay_config(tmp_path)
    async with serving(config):
        with pytest.raises(AsyncGrpoError, match="in use by another replay server"):
            ReplayServer(config)
