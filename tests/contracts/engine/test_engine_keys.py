"""Keys, as SGLang checks them: which key opens which call, and which calls need none."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.load import load_config
from async_grpo.engine import server
from async_grpo.engine.model import load_model
from async_grpo.engine_api import ADMIN_PATHS
from async_grpo.engine_api import Path as Route
from tests.contracts.engine.conftest import body_of, real_subject
from tests.fakes.fake_engine import FakeEngine
from tests.sglang.real_server import RealServer

pytestmark = pytest.mark.timeout(180)  # loads a model on a busy machine

API, ADMIN = "the-api-key", "the-admin-key"
OPEN = [("GET", Route.READY), ("GET", Route.HEALTH), ("GET", Route.METRICS)]
NORMAL = [
    ("POST", Route.GENERATE),
    ("GET", Route.MODEL_INFO),
    ("GET", Route.SERVER_INFO),
    ("GET", Route.LOADS),
]
CONTROL = [("POST", path) for path in sorted(ADMIN_PATHS)]


@asynccontextmanager
async def fake(keys):
    async with FakeEngine(keys=keys) as engine:
        yield engine.url


async def status(url, method, path, key):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = body_of(2) if path is Route.GENERATE else {}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.request(method, url + path, json=body) as reply,
    ):
        if reply.status == 401:
            assert await reply.json() == {"error": "Unauthorized"}
        return reply.status


async def opened_by(keys, method, path):
    """Which of no key, the API key, the admin key and a wrong one open the path."""
    async with fake(keys) as url:
        tried = [("none", None), ("api", API), ("admin", ADMIN), ("wrong", API[:-1])]
        return {name for name, key in tried if await status(url, method, path, key) != 401}


ALL = {"none", "api", "admin", "wrong"}


@pytest.mark.parametrize(("method", "path"), OPEN)
async def test_probes_of_life_need_no_key(method, path):
    assert await opened_by(EngineKeys(API, ADMIN), method, path) == ALL


@pytest.mark.parametrize(("method", "path"), NORMAL)
async def test_the_api_key_and_no_other_opens_normal_calls(method, path):
    assert await opened_by(EngineKeys(API, ADMIN), method, path) == {"api"}
    assert await opened_by(EngineKeys(api=API), method, path) == {"api"}
    assert await opened_by(EngineKeys(admin=ADMIN), method, path) == ALL
    assert await opened_by(EngineKeys(), method, path) == ALL


@pytest.mark.parametrize(("method", "path"), CONTROL)
async def test_control_calls_take_the_admin_key_where_there_is_one(method, path):
    assert await opened_by(EngineKeys(API, ADMIN), method, path) == {"admin"}
    assert await opened_by(EngineKeys(api=API), method, path) == {"api"}


def real_keys(server: RealServer) -> dict[str, str | None]:
    tried = {"none": None, "api": server.keys.api, "admin": server.keys.admin, "wrong": "wrong"}
    return {name: key for name, key in tried.items() if key != ""}


@pytest.mark.sglang
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", ["sglang", "sglang-tp2"])
async def test_a_real_server_asks_for_the_same_keys(real_servers: dict[str, RealServer], name: str):
    """With both keys, and with the API key alone."""
    server = real_servers[name]
    async with real_subject(server):  # ends what the calls below begin
        for method, path in [*OPEN, *NORMAL, *CONTROL]:
            opens = {
                label
                for label, key in real_keys(server).items()
                if await status(server.url, method, path, key) != 401
            }
            needed = server.keys.for_path(path)
            expected = {label for label, key in real_keys(server).items() if key == needed}
            assert opens == (expected if needed else set(real_keys(server))), path
            if path in (Route.PAUSE, Route.BEGIN_UPDATE):
                await status(server.url, "POST", Route.CONTINUE, needed)
                await status(server.url, "POST", Route.END_UPDATE, needed)


async def test_another_scheme_is_refused():
    async with fake(EngineKeys(api=API)) as url, aiohttp.ClientSession() as http:
        for header in (API, f"Basic {API}", f"bearer{API}", "Bearer "):
            async with http.get(url + "/model_info", headers={"Authorization": header}) as reply:
                assert reply.status == 401


async def test_the_embedded_engine_asks_for_the_keys_of_its_configuration(
    config_path: Path, tmp_path: Path
):
    files = {name: tmp_path / name for name in ("api", "admin")}
    files["api"].write_text(API + "\n")
    files["admin"].write_text(ADMIN + "\n")
    config = load_config(
        config_path,
        [
            f"engine.api_key_file={files['api']}",
            f"engine.admin_api_key_file={files['admin']}",
        ],
    )
    announced = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        server.serve(config, load_model(config), port=0, announce=announced.set_result)
    )
    try:
        url = await announced
        assert await status(url, "GET", Route.READY, None) == 200
        assert await status(url, "POST", Route.GENERATE, None) == 401
        assert await status(url, "POST", Route.GENERATE, API) == 200
        assert await status(url, "POST", Route.PAUSE, API) == 401
        assert await status(url, "POST", Route.PAUSE, ADMIN) == 200
    finally:
        serving.cancel()
        await asyncio.wait([serving])
