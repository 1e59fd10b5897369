"""Requests in flight across real weight updates: sampler, driver, HTTP, gloo and a real model."""

from collections.abc import Iterator

import pytest
import yaml

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.generation import OnWeightUpdate
from tests.contracts.engine.conftest import make_model, serve
from tests.fakes.engine_station import fly_through_updates, station

pytestmark = pytest.mark.timeout(180)  # loads a model on a busy machine

KEYS = EngineKeys("api", "admin")


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A process: both ends of an update group must not be in one."""
    directory = tmp_path_factory.mktemp("embedded")
    make_model(0).save_pretrained(directory / "model")
    for name, key in (("api", KEYS.api), ("admin", KEYS.admin)):
        (directory / name).write_text(key)
    content = {
        "run": {"output_dir": str(directory / "run"), "num_train_steps": 1},
        "policy": {"model": str(directory / "model")},
        "task": {"name": "reverse"},
        "engine": {
            "max_running_requests": 8,
            "api_key_file": str(directory / "api"),
            "admin_api_key_file": str(directory / "admin"),
        },
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(content))
    process, url = serve(directory / "config.yaml")
    yield url
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()


@pytest.mark.parametrize("mode", list(OnWeightUpdate))
async def test_requests_in_flight_outlast_two_updates(
    engine_url: str, mode: OnWeightUpdate
) -> None:
    async with station(engine_url, mode, KEYS) as at:
        incarnation = list(OnWeightUpdate).index(mode) + 1
        await fly_through_updates(at, incarnation=incarnation, mode=mode)
