"""Which engines the configuration starts."""

import pytest

from async_grpo.config.engine import EngineSection
from async_grpo.config.engine_keys import EngineKeys
from async_grpo.config.policy import PolicySection
from async_grpo.config.run import RunSection
from async_grpo.config.schema import Config
from async_grpo.config.task import TaskSection
from async_grpo.errors import ConfigError
from async_grpo.generation.handles import AttachedEngine
from async_grpo.generation.starts import engine_starts

KEYS = EngineKeys("a-key")


def config(**engine: object) -> Config:
    return Config(
        run=RunSection(output_dir="out", num_train_steps=1),
        policy=PolicySection(model="m"),
        task=TaskSection(name="reverse"),
        engine=EngineSection(**engine),
    )


async def start_own(config, keys, log, environment):
    """A server of somebody else's; what it was asked for is its URL."""
    assert keys is KEYS
    return AttachedEngine(f"{log} on {environment['CUDA_VISIBLE_DEVICES']}, {environment['A']}")


async def test_an_engine_of_ones_own_is_started_like_the_others():
    section = {
        "kind": f"{__name__}:start_own",
        "num_engines": 2,
        "device_ids": ["0,1", "2,3"],
        "environment": {"A": "b"},
    }
    assert not list(EngineSection(**section).problems("engine"))
    starts = engine_starts(config(**section), "gen", [], KEYS)
    urls = [(await start("id")).url for start in starts]
    assert urls == ["out/logs/gen.engine0.log on 0,1, b", "out/logs/gen.engine1.log on 2,3, b"]


async def test_engines_by_url_are_attached_to_whatever_they_are():
    starts = engine_starts(config(kind="sglang", urls=["http://a:1", "http://b:2"]), "g", [], KEYS)
    assert [(await start("id")).url for start in starts] == ["http://a:1", "http://b:2"]


def test_an_engine_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match=r"engine\.kind: cannot import 'no_such_module'"):
        engine_starts(config(kind="no_such_module:start"), "gen", [], KEYS)
