"""Publisher, replay server, generator and driver against real servers: transports and failures."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import ClientSession, ClientTimeout, web

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.policy import PolicySection
from async_grpo.config.weights import Transport
from async_grpo.engine_api import Path as Route
from async_grpo.engine_api import UpdateFromDistributedRequest
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.handles import AttachedEngine, OwnedEngine
from async_grpo.generation.starts import engine_starts
from async_grpo.interfaces import EngineClient, WeightSource
from async_grpo.replay_parts import Probe
from async_grpo.weights.server_names import unknown_names
from tests.contracts.engine.conftest import REAL_MARKS, VOCAB_SIZE, make_model, make_tokenizer
from tests.contracts.engine.update_tools import reference_logprobs
from tests.fakes.fake_engine import probe_of
from tests.fakes.gloo_world import GlooWorld
from tests.sglang.real_server import RealServer, require_environment
from tools.sglang_cpu.serve import serving_config

pytestmark = REAL_MARKS

PROBE_IDS = [7, 9, 11, 13, 15]
NORM = "model.norm.weight"
LEFT_OUT = "model.layers.0.self_attn.o_proj.weight"
BUCKET_BYTES = 16_000
"""Several buckets of the tiny model."""


class ModelSource:
    """Another model's weights for each version, changed by `spoil`."""

    def __init__(self, version: int, spoil: Callable[[dict[str, torch.Tensor]], None]) -> None:
        self._model = make_model(100 + version)
        self._spoil = spoil

    def named_tensors(self) -> Any:
        tensors = dict(self._model.named_parameters())  # tied ones once
        self._spoil(tensors)
        return iter(tensors.items())

    def probe(self) -> Probe:
        logprobs = reference_logprobs(self._model, PROBE_IDS[:1], PROBE_IDS[1:]).tolist()
        return probe_of(PROBE_IDS, logprobs, 2e-5)


class ServerWorld(GlooWorld):
    """`GlooWorld` whose engines are real servers that run already."""

    def __init__(self, directory: Path, servers: list[RealServer], **options: Any) -> None:
        weights = {"engines_per_cell": len(servers), **options}
        super().__init__(directory, num_engines=len(servers), owned=False, **weights)
        self._servers = servers
        self._up_s = 300.0
        self._config = replace(
            self._config, weights=replace(self._config.weights, bucket_bytes=BUCKET_BYTES)
        )
        self.spoil: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None

    async def _start_attached(self) -> None:
        """They run."""

    async def _start_engine(self, slot: int, engine_id: str) -> Any:
        return AttachedEngine(self._servers[slot].url)

    def _make_client(self, url: str) -> EngineClient:
        keys = next(server.keys for server in self._servers if server.url == url)
        return HttpEngineClient(url, control_timeout_s=60.0, vocab_size=VOCAB_SIZE, keys=keys)

    def _make_source(self, version: int) -> WeightSource:
        return ModelSource(version, self.spoil)

    def plan_anew(self) -> None:
        """A publisher plans once; a trainer with other tensors is another trainer."""
        self.publisher._plan = self.publisher._snapshot = None


@pytest.mark.parametrize("transport", list(Transport))
async def test_weights_reach_servers_of_one_and_two_ranks(
    tmp_path, real_servers: dict[str, RealServer], transport: Transport
) -> None:
    """The probe proves parity to 2e-5 on both, in one cell of world 4, or by files."""
    world = ServerWorld(
        tmp_path, list(real_servers.values()), timeout_s=120.0, weights={"transport": transport}
    )
    async with world.whole():
        for version in range(3):
            result = await world.publish(version)
            assert result.failures == []
            assert result.alarms == []
            assert len(result.reports) == 2
            assert result.metrics()["sync/probe_gap"] < 2e-5
            await world.until(lambda version=version: world.serves(version))


async def test_names_that_a_server_lacks_are_found_before_anything_is_sent(
    tmp_path, real_servers: dict[str, RealServer]
) -> None:
    """Sent, they would be taken in silence: test_update_group.py."""
    servers = list(real_servers.values())
    world = ServerWorld(tmp_path, servers, timeout_s=120.0)

    def misspell(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_prj.weight"] = tensors.pop(
            "model.layers.0.self_attn.q_proj.weight"
        )

    async with world.whole():
        found = [await world.engine(slot).client.checksums() for slot in (0, 1)]
        known = [set(each.tensors) for each in found]
        names = [name for name, _ in ModelSource(0, lambda _: None).named_tensors()]
        assert [unknown_names(names, names_of_server) for names_of_server in known] == [[], []]
        assert any("qkv_proj" in name for name in known[0])
        world.spoil = misspell
        (failure,) = (await world.publish(0)).failures
        assert "q_prj.weight (1 of" in failure
        world.plan_anew()
        world.spoil = lambda tensors: None
        await world.until(lambda: world.num_wishing == 2)
        assert (await world.publish(1)).failures == []
        await world.until(lambda: world.serves(1))


class LosingClient(HttpEngineClient):
    """Asks for one tensor under a name that the server does not know, and so ignores."""

    loses = False

    async def update_from_distributed(
        self, request: UpdateFromDistributedRequest, *, timeout_s: float
    ) -> None:
        if LosingClient.loses:
            names = [name.replace(LEFT_OUT, "unheard.of.weight") for name in request.names]
            request = msgspec.structs.replace(request, names=names)
        await super().update_from_distributed(request, timeout_s=timeout_s)


class LosingWorld(ServerWorld):
    """Its probe allows everything, so that only checksums can tell."""

    def _make_client(self, url: str) -> EngineClient:
        keys = next(server.keys for server in self._servers if server.url == url)
        return LosingClient(url, control_timeout_s=60.0, vocab_size=VOCAB_SIZE, keys=keys)

    def _make_source(self, version: int) -> WeightSource:
        return AllowingSource(version, self.spoil)


class AllowingSource(ModelSource):
    """As after a small step: the probe sees no difference."""

    def probe(self) -> Probe:
        return msgspec.structs.replace(super().probe(), tolerance=1e3, max_tolerance=1e3)


async def test_a_tensor_that_was_left_out_is_found_by_its_checksum(
    tmp_path, real_servers: dict[str, RealServer]
) -> None:
    """A 200 for each bucket, the right version, and one tensor as it was."""
    world = LosingWorld(tmp_path, list(real_servers.values())[:1], timeout_s=120.0)
    LosingClient.loses = False
    async with world.whole():
        assert (await world.publish(0)).failures == []
        LosingClient.loses = True
        (failure,) = (await world.publish(1)).failures
        LosingClient.loses = False
        assert f"'checksum': {LEFT_OUT} is as with weights" in failure
        await world.until(lambda: world.num_wishing == 1)
        assert (await world.serve_wishes()).failures == []
        await world.until(lambda: world.serves(1))


async def test_a_wrong_shape_costs_the_engine_its_weights_until_the_next_update(
    tmp_path, real_servers: dict[str, RealServer]
) -> None:
    world = ServerWorld(tmp_path, list(real_servers.values())[:1], timeout_s=120.0)

    def stretch(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NORM] = torch.ones(len(tensors[NORM]) + 4)

    async with world.whole():
        first = world.status(0).engine_id
        world.spoil = stretch
        (failure,) = (await world.publish(0)).failures
        assert "bucket" in failure
        await world.until(lambda: world.status(0).engine_id != first and world.num_wishing == 1)
        world.plan_anew()
        world.spoil = lambda tensors: None
        assert (await world.publish(1)).failures == []
        await world.until(lambda: world.serves(1))


class Proxy:
    """Before a server: may have it killed when a call arrives, or when it has been answered."""

    def __init__(self, handle: OwnedEngine) -> None:
        self._handle = handle
        self.owned, self.url = True, ""
        self.kill_at: tuple[Route, int, bool] | None = None
        """(path, calls to let pass, whether the fatal one is answered first by the server)"""

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._http = ClientSession(timeout=ClientTimeout(total=None))
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _forward(self, request: web.Request) -> web.Response:
        body, fatal, answered = await request.read(), False, False
        if self.kill_at is not None and request.path == self.kill_at[0]:
            path, passes, answered = self.kill_at
            fatal = passes == 0
            self.kill_at = None if fatal else (path, passes - 1, answered)
        if fatal and not answered:
            await self._handle.kill()
        headers = {
            key: request.headers[key] for key in ("Authorization",) if key in request.headers
        }
        async with self._http.request(
            request.method, self._handle.url + request.path_qs, data=body,
            headers={**headers, "Content-Type": "application/json"},
        ) as reply:  # fmt: skip
            content = await reply.read()
        if fatal:
            await self._handle.kill()
        return web.Response(status=reply.status, body=content, content_type=reply.content_type)

    async def wait(self) -> str:
        return await self._handle.wait()

    async def kill(self) -> None:
        await self._handle.kill()
        await self._close()

    async def terminate(self) -> None:
        await self._handle.terminate()
        await self._close()

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._http.close()


class OwnedServerWorld(ServerWorld):
    """Two servers that the generator starts, each behind a proxy, in one cell."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, [], timeout_s=60.0, engines_per_cell=2)
        self._owned, self._num_engines = True, 2
        self.proxies: dict[int, Proxy] = {}
        model = directory / "model"
        make_model(0).save_pretrained(model)
        make_tokenizer().save_pretrained(model)
        changes = {
            "engine.num_engines": 2,
            "engine.max_running_requests": 8,
            "engine.start_timeout_s": 900,
            "engine.control_timeout_s": 60,
        }
        served = serving_config(model, [f"{name}={value}" for name, value in changes.items()])
        self._config = replace(
            self._config, engine=served.engine, policy=PolicySection(model=str(model))
        )
        self._up_s = 900.0

    async def _start_engine(self, slot: int, engine_id: str) -> Any:
        start = engine_starts(self.config, "gen", [], EngineKeys())[slot]
        handle = await start(engine_id)
        assert isinstance(handle, OwnedEngine)
        self.proxies[slot] = Proxy(handle)
        await self.proxies[slot].start()
        return self.proxies[slot]

    def _make_client(self, url: str) -> EngineClient:
        return HttpEngineClient(url, control_timeout_s=60.0, vocab_size=VOCAB_SIZE)


@asynccontextmanager
async def _two_servers(directory: Path) -> AsyncIterator[OwnedServerWorld]:
    require_environment()
    world = OwnedServerWorld(directory)
    async with world.whole():
        yield world


@pytest.mark.timeout(2400)  # servers start four times
async def test_a_server_killed_at_a_bucket_costs_no_more_than_its_cell(tmp_path) -> None:
    """Killed when the second bucket is posted to it, then when it has answered the last one."""
    async with _two_servers(tmp_path) as world:
        assert (await world.publish(0)).failures == []
        await world.until(lambda: world.serves(0))
        num_buckets = len(world.publisher._plan.buckets)
        assert num_buckets > 2
        for version, kill_at in enumerate([(1, False), (num_buckets - 1, True)], start=1):
            victim = world.status(1).engine_id
            world.proxies[1].kill_at = (Route.UPDATE_FROM_DISTRIBUTED, *kill_at)
            (failure,) = (await world.publish(version)).failures
            assert f"{victim} is failed" in failure
            await world.until(lambda victim=victim: world.status(1).engine_id != victim)
            while not world.serves(version):
                await world.until(
                    lambda version=version: world.serves(version) or world.num_wishing > 0,
                    timeout_s=900.0,
                )
                if world.num_wishing:
                    await world.serve_wishes()
        result = await world.publish(3)
        assert (result.failures, result.num_cells) == ([], 1)
        await world.until(lambda: world.serves(3))
