"""One update group with two real servers, of one rank and of two; and what a real server accepts.

What must never be believed of a server is in docs/sglang.md; each test here shows one reason.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from async_grpo.weights.group import UpdateGroup, join_group, listen
from tests.contracts.engine.conftest import REAL_MARKS, Subject, make_model, real_subject
from tests.contracts.engine.update_tools import Sender, checksum_of, gap, version_of
from tests.sglang.real_server import RealServer

pytestmark = REAL_MARKS

TOLERANCE = 1e-5
NORM = "model.norm.weight"
_NUMBERS = itertools.count()


class Cell:
    """The trainer's side of one update group with several servers."""

    def __init__(self, engines: list[Subject]) -> None:
        self.engines = engines
        self.world_size = 1 + sum(engine.tp_size for engine in engines)
        self.name = ""
        self._group: UpdateGroup | None = None

    async def meet(self) -> None:
        """A group under a fresh name and port; rank 0 is ours, then the ranks of each server."""
        self.name = f"cell-{os.getpid()}-{next(_NUMBERS)}"
        store, port = listen("127.0.0.1")
        offsets = itertools.accumulate([1, *(engine.tp_size for engine in self.engines)])
        calls = [
            engine.post(
                "/init_weights_update_group",
                {
                    "master_address": "127.0.0.1", "master_port": port, "rank_offset": offset,
                    "world_size": self.world_size, "group_name": self.name, "backend": "gloo",
                },
            )
            for engine, offset in zip(self.engines, offsets, strict=False)
        ]  # fmt: skip
        *replies, self._group = await asyncio.gather(
            *calls,
            asyncio.to_thread(
                join_group, host="127.0.0.1", port=port, rank=0, world_size=self.world_size,
                group_name=self.name, backend="gloo", timeout_s=60, store=store,
            ),
        )  # fmt: skip
        assert all(status == 200 for status, _ in replies), replies

    async def everywhere(self, path: str, body: Any = None) -> None:
        replies = await asyncio.gather(*(engine.post(path, body) for engine in self.engines))
        assert all(status == 200 for status, _ in replies), replies

    async def send(self, tensors: dict[str, torch.Tensor], version: str | None) -> None:
        """One bucket: posted to all, broadcast once."""
        body = {
            "names": list(tensors),
            "dtypes": ["float32"] * len(tensors),
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": self.name,
            "flush_cache": False,
            "load_format": "flattened_bucket",
            "weight_version": version,
        }
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
        assert self._group is not None
        await asyncio.gather(
            self.everywhere("/update_weights_from_distributed", body),
            asyncio.to_thread(self._group.broadcast, flat),
        )

    async def publish(self, model: torch.nn.Module, version: str) -> None:
        """Two buckets, while paused."""
        await self.everywhere("/pause_generation", {"mode": "retract"})
        await self.everywhere("/begin_weight_update")
        tensors = dict(model.named_parameters())
        names = list(tensors)
        await self.send({name: tensors[name] for name in names[:9]}, None)
        await self.send({name: tensors[name] for name in names[9:]}, version)
        await self.everywhere("/end_weight_update")
        await self.everywhere("/flush_cache")
        await self.everywhere("/continue_generation")

    async def part(self) -> None:
        await self.everywhere("/destroy_weights_update_group", {"group_name": self.name})
        assert self._group is not None
        self._group.close()


@pytest.fixture
async def both(real_servers: dict[str, RealServer]) -> AsyncIterator[list[Subject]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(real_subject(server))
            for server in real_servers.values()
        ]


async def test_one_group_reaches_two_servers_of_different_sizes(both: list[Subject]) -> None:
    """World = 1 + 1 + 2; met, parted and met again."""
    cell = Cell(both)
    assert cell.world_size == 4
    for number in range(3):
        await cell.meet()
        model = make_model(70 + number)
        before = [await checksum_of(engine) for engine in both]
        await cell.publish(model, f"40.{number}")
        for engine, checksum in zip(both, before, strict=True):
            assert await version_of(engine) == f"40.{number}"
            assert await checksum_of(engine) != checksum
            reply = await engine.generate(24, extra_key=f"40.{number}")
            assert gap(reply, model).max() < TOLERANCE
        await cell.part()


@pytest.fixture
async def engine(real_servers: dict[str, RealServer]) -> AsyncIterator[Subject]:
    async with real_subject(real_servers["sglang"]) as subject:
        yield subject


@pytest.fixture
async def sender(engine: Subject) -> AsyncIterator[Sender]:
    sender = Sender(engine)
    await sender.join()
    yield sender
    await sender.leave()


async def test_without_a_namespace_an_in_place_update_leaves_stale_prefixes(
    sender: Sender,
) -> None:
    """Why every request names its weights as `extra_key`."""
    engine, model = sender.engine, make_model(81)
    prompt = [5, 9, 12, 7, 33, 21, 8, 40]
    await sender.publish(make_model(80), "41.0")
    await engine.generate(2, input_ids=prompt)
    await engine.post("/pause_generation", {"mode": "in_place"})
    await sender.publish(model, "41.1")
    await engine.post("/continue_generation")
    stale = await engine.generate(12, input_ids=prompt)
    fresh = await engine.generate(12, input_ids=prompt, extra_key="41.1")
    assert stale["meta_info"]["cached_tokens"] > 0
    assert gap(stale, model, prompt=prompt).max() > 0.01
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert gap(fresh, model, prompt=prompt).max() < TOLERANCE


async def test_a_name_it_does_not_know_is_taken_in_silence(sender: Sender) -> None:
    """Why names are checked before the first update, and weights probed after each."""
    engine = sender.engine
    await sender.publish(make_model(82), "42.0")
    before = await checksum_of(engine)
    await engine.post("/begin_weight_update")
    status, reply = await sender.send({"model.no_such.weight": torch.ones(3)}, "42.1")
    assert (status, reply["success"]) == (200, True)
    await engine.post("/end_weight_update")
    assert await version_of(engine) == "42.1"
    assert await checksum_of(engine) == before


async def test_a_wrong_shape_is_refused_half_done_and_mended_by_a_whole_update(
    sender: Sender,
) -> None:
    engine = sender.engine
    await sender.publish(make_model(83), "43.0")
    before = await checksum_of(engine)
    await engine.post("/begin_weight_update")
    norm = torch.full((32,), 3.0)
    wrong = {"model.layers.0.input_layernorm.weight": norm, NORM: torch.ones(31)}
    status, reply = await sender.send(wrong, "43.1")
    assert (status, reply["success"]) == (400, False)
    assert await version_of(engine) == "43.0"
    assert (await engine.post("/end_weight_update"))[0] == 200
    assert await checksum_of(engine) != before  # what came before the bad tensor is in
    model = make_model(84)
    await sender.publish(model, "43.2")
    assert gap(await engine.generate(24, extra_key="43.2"), model).max() < TOLERANCE


async def test_another_dtype_is_cast_without_a_word(sender: Sender) -> None:
    """Why the probe's tolerance goes by the engine's dtype."""
    engine, model = sender.engine, make_model(85)
    await engine.post("/begin_weight_update")
    rounded = {name: tensor.bfloat16() for name, tensor in model.named_parameters()}
    status, reply = await sender.send(rounded, "44.0")
    assert (status, reply["success"]) == (200, True)
    await engine.post("/end_weight_update")
    reply = await engine.generate(24, extra_key="44.0")
    assert 1e-4 < gap(reply, model).max() < 1.0
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    assert gap(reply, model).max() < TOLERANCE


async def test_a_rendezvous_without_the_trainer_blocks_until_somebody_comes(
    engine: Subject,
) -> None:
    """Why an engine that does not answer a control call is sent nothing more."""
    store, port = listen("127.0.0.1")
    body = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2,
        "group_name": "late", "backend": "gloo",
    }  # fmt: skip
    joining = asyncio.create_task(engine.post("/init_weights_update_group", body))
    generating = asyncio.create_task(engine.generate(2))
    done, _ = await asyncio.wait([joining, generating], timeout=3)
    assert joining not in done
    group = await asyncio.to_thread(
        join_group, host="127.0.0.1", port=port, rank=0, world_size=2, group_name="late",
        backend="gloo", timeout_s=60, store=store,
    )  # fmt: skip
    assert (await joining)[0] == 200
    assert len((await generating)["output_ids"]) == 2
    assert (await engine.post("/destroy_weights_update_group", {"group_name": "late"}))[0] == 200
    group.close()


async def test_a_begin_waits_for_requests_that_nobody_paused(sender: Sender) -> None:
    """Why an update pauses first, and why a leftover session is closed while paused."""
    engine = sender.engine
    running = await engine.start_long("unpaused")
    beginning = asyncio.create_task(engine.post("/begin_weight_update"))
    done, _ = await asyncio.wait([beginning], timeout=1)
    assert not done
    await engine.post("/abort_request", {"rid": "unpaused"})
    assert (await beginning)[0] == 200
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await engine.post("/end_weight_update"))[0] == 200
