"""Real SGLang servers for the tests that are marked `sglang`."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from async_grpo.config.engine_keys import EngineKeys
from tests.sglang.real_server import RealServer, require_environment, starting


@pytest.fixture(scope="session")
def real_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RealServer]]:
    """Two servers of the contract's model: `sglang` with both keys, `sglang-tp2` with one."""
    # here: every test loads this file, few have torch to do with
    from tests.contracts.engine.conftest import make_model, make_tokenizer

    require_environment()
    directory: Path = tmp_path_factory.mktemp("sglang")
    model = directory / "model"
    make_model(0).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    keys = {"sglang": EngineKeys("api-key", "admin-key"), "sglang-tp2": EngineKeys("api-key")}
    with ExitStack() as stack:
        starts = {  # both at once: most of it is imports
            name: stack.enter_context(
                starting(model, directory / f"{name}.log", tp_size=tp_size, keys=keys[name])
            )
            for name, tp_size in (("sglang", 1), ("sglang-tp2", 2))
        }
        yield {name: answering() for name, answering in starts.items()}
