"""The replay server and its clients over real sockets on loopback."""

import asyncio
import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest

from async_grpo.config.run_directory import RunDirectory
from async_grpo.errors import (
    RemoteError,
)
from async_grpo.interfaces import GeneratorReplay, TrainerReplay
from async_grpo.replay.generator_client import GeneratorClient
from async_grpo.replay.monitor_client import MonitorClient
from async_grpo.replay.server import ReplayServer
from async_grpo.replay.trainer_client import TrainerClient
from async_grpo.replay_api.generator import Insert, InsertReply
from async_grpo.replay_parts import EndStats
from async_grpo.transport.codec import encode_group
from async_grpo.types import DropReason, InsertOutcome, WeightsName
from tests.fakes.replay_harness import (
    DATASET,
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


def ledger_types(config) -> list[str]:
    path = RunDirectory(Path(config.run.output_dir)).ledger
    return [json.loads(line)["type"] for line in path.read_text().splitlines()]


def test_clients_are_what_the_roles_expect(tmp_path):
    config = at_address(replay_config(tmp_path), "tcp://127.0.0.1:1")
    generator: GeneratorReplay = GeneratorClient(config, name="g", dataset=DATASET)
    trainer: TrainerReplay = TrainerClient(config)
    assert (generator, trainer) != (None, None)


async def test_group_goes_from_claim_to_ack(tmp_path):
    config = replay_config(tmp_path)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config) as generator, training(config) as trainer:
            weights = await go_live(trainer, generator)
            sent = {}
            for _ in range(2):
                ticket = await claimed(generator)
                sent[ticket.group_id] = group_for(ticket, weights)
                assert await generator.insert(sent[ticket.group_id]) is InsertOutcome.STORED
            assert server.payload_bytes > 0
            drawn = await trainer.draw(1, 0)
            assert {group.group_id for group in drawn.groups} == set(sent)
            assert drawn.generated.num_groups == 2
            for leased in drawn.groups:
                received = await trainer.fetch(leased.group_id, leased.attempt)
                assert received.num_tokens == leased.num_tokens
                for ours, theirs in zip(
                    sent[leased.group_id].rollouts, received.rollouts, strict=True
                ):
                    assert ours.reward == theirs.reward
                    np.testing.assert_array_equal(
                        ours.sequences[0].token_ids, theirs.sequences[0].token_ids
                    )
                    np.testing.assert_array_equal(
                        ours.sequences[0].behavior_logprobs, theirs.sequences[0].behavior_logprobs
                    )
            keys = [(group.group_id, group.attempt) for group in drawn.groups]
            await trainer.ack(0, 1, keys)
            assert server.payload_bytes == 0
            with pytest.raises(RemoteError, match="not_found"):
                await trainer.fetch(*keys[0])
    assert ledger_types(config).count("Stored") == 2
    assert ledger_types(config)[-1] == "Trained"


async def test_waiting_draw_is_answered_by_the_insert_that_completes_it(tmp_path):
    config = replay_config(tmp_path, heartbeat_s=4.0)  # long polls of 20 s
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config) as generator, training(config) as trainer:
            weights = await go_live(trainer, generator)
            draw = asyncio.create_task(trainer.draw(1, 0))
            for _ in range(2):
                assert not draw.done()
                ticket = await claimed(generator)
                await generator.insert(group_for(ticket, weights))
            drawn = await asyncio.wait_for(draw, 10)
            assert len(drawn.groups) == 2


async def test_long_poll_that_finds_nothing_ends_empty(tmp_path):
    config = replay_config(tmp_path, heartbeat_s=0.05)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config) as generator, training(config) as trainer:
            assert await generator.claim() is None  # nothing is live
            await trainer.start(0)
            drawn = await trainer.draw(1, 0)
            assert (drawn.groups, drawn.wishes) == ([], [])
            watched = await generator.watch(0)
            assert (await generator.watch(watched.revision)).revision == watched.revision


async def test_second_insert_is_a_duplicate_and_of_an_ended_attempt_fenced(tmp_path):
    config = replay_config(tmp_path)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config) as generator, training(config) as trainer:
            weights = await go_live(trainer, generator)
            ticket = await claimed(generator)
            group = group_for(ticket, weights)
            bulk = generator._bulk()
            for expected in (InsertOutcome.STORED, InsertOutcome.DUPLICATE):
                reply = await bulk.ask(
                    Insert(group_id=ticket.group_id, attempt=ticket.attempt),
                    InsertReply,
                    payload=encode_group(group),
                )
                assert reply.outcome is expected
            held = server.payload_bytes
            other = await claimed(generator)
            await generator.end(other, DropReason.REWARD_FAILED, "no judge", EndStats())
            assert await generator.insert(group_for(other, weights)) is InsertOutcome.FENCED
            assert server.payload_bytes == held


async def test_restart_in_the_middle_goes_unnoticed(tmp_path):
    config = replay_config(tmp_path)
    async with serving(config) as server:
        config = at_address(config, server.address)
        generator = GeneratorClient(config, name="g0", dataset=DATASET)
        trainer = TrainerClient(config)
        await generator.connect()
        await trainer.connect()
        weights = await go_live(trainer, generator)
        tickets = [await claimed(generator) for _ in range(4)]
        for ticket in tickets[:2]:
            await generator.insert(group_for(ticket, weights))
        drawn = await trainer.draw(1, 0)
        await trainer.fetch(drawn.groups[0].group_id, drawn.groups[0].attempt)
        assert await generator.insert(group_for(tickets[2], weights)) is InsertOutcome.STORED
        watching = asyncio.create_task(generator.watch((await generator.watch(0)).revision))
        # a payload on its way while there is no server
    inserting = asyncio.create_task(generator.insert(group_for(tickets[3], weights)))
    async with serving(config) as server:
        try:
            async with asyncio.timeout(20):
                assert await inserting is InsertOutcome.STORED
                await watching
                await trainer.heartbeat([1], STATUS)
                # leased groups stay leased, but only fetched ones are of use
                with pytest.raises(RemoteError, match=r"not_found.*restart"):
                    await trainer.fetch(drawn.groups[1].group_id, drawn.groups[1].attempt)
                await trainer.ack(0, 1, [(group.group_id, group.attempt) for group in drawn.groups])
            stats = server._core.stats(0.0)
            assert (stats.trained, stats.stored, stats.reissued) == (2, 1, {"lost": 1})
        finally:
            await generator.close()
            await trainer.close()


async def test_full_buffer_blocks_the_producer_until_there_is_room(tmp_path):
    config = replay_config(tmp_path, max_groups=2)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config) as generator, training(config) as trainer:
            weights = await go_live(trainer, generator)
            tickets = [await claimed(generator) for _ in range(3)]
            for ticket in tickets[:2]:
                await generator.insert(group_for(ticket, weights))
            third = asyncio.create_task(generator.insert(group_for(tickets[2], weights)))
            drawn = await trainer.draw(1, 0)
            assert not third.done()
            await trainer.ack(0, 1, [(group.group_id, group.attempt) for group in drawn.groups])
            assert await asyncio.wait_for(third, 10) is InsertOutcome.STORED


async def test_monitor_reads_counters_and_holds_nobody_up(tmp_path):
    config = replay_config(tmp_path)
    server = ReplayServer(config)
    serve = asyncio.create_task(server.serve())
    config = at_address(config, server.address)
    monitor = MonitorClient(config)
    try:
        await monitor.connect()
        async with connected(config) as generator, training(config) as trainer:
            weights = await go_live(trainer, generator)
            stats = await monitor.stats()
            assert (stats.tickets, stats.live) == (0, WeightsName(weights[0], 0))
            assert {peer.name for peer in stats.peers} == {"g0", "trainer"}
            await trainer.finish("done")
            assert (await generator.watch(0)).stop == "done"
            await generator.leave("told to")
            await trainer.leave("done")
            await asyncio.wait_for(serve, 10)
    finally:
        await monitor.close()
        server.close()


async def test_leaving_gives_claims_back_at_once(tmp_path):
    config = replay_config(tmp_path)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config) as generator, training(config) as trainer:
            await go_live(trainer, generator)
            await claimed(generator)
            await generator.leave("test")
            assert server._core.stats(0.0).claimed == 0


async def test_a_restart_begins_from_the_newest_snapshot(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("async_grpo.replay.server.EVERY_RECORDS", 4)
    config = replay_config(tmp_path)
    async with serving(config) as server:
        config = at_address(config, server.address)
        async with connected(config) as generator, training(config) as trainer:
            weights = await go_live(trainer, generator)
            for _ in range(2):
                ticket = await claimed(generator)
                await generator.insert(group_for(ticket, weights))
            drawn = await trainer.draw(1, 0)
            keys = [(group.group_id, group.attempt) for group in drawn.groups]
            await trainer.ack(0, 1, keys)
    num_records = len(ledger_types(config))
    with caplog.at_level(logging.INFO):
        async with serving(config) as server:
            assert server._core.policy_version == 1
            assert server._core.stats(0.0).trained == 2
    (line,) = [text for text in caplog.messages if "records restored" in text]
    restored, saved = (int(number) for number in re.findall(r"(\d+) (?:ledger|of them)", line))
    assert restored == num_records
    assert num_records - 4 < saved <= num_records
