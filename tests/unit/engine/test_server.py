import pytest

from async_grpo.config.engine import EngineSection
from async_grpo.config.policy import PolicySection
from async_grpo.config.run import RunSection
from async_grpo.config.schema import Config
from async_grpo.config.task import TaskSection
from async_grpo.engine import server
from async_grpo.errors import ConfigError


def test_the_embedded_engine_does_not_serve_in_the_place_of_sglang():
    config = Config(
        run=RunSection(output_dir="out", num_train_steps=1),
        policy=PolicySection(model="m"),
        task=TaskSection(name="reverse"),
        engine=EngineSection(kind="sglang", python="p"),
    )
    with pytest.raises(ConfigError, match=r"engine\.kind: this is the embedded engine, not sglang"):
        server.main(config, port=0)
