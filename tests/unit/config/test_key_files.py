import pytest

from async_grpo.config.engine import EngineSection
from async_grpo.config.engine_keys import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    EngineKeys,
    load_engine_keys,
)
from async_grpo.engine_api import Path as Route
from async_grpo.errors import ConfigError


def test_without_files_or_variables_there_are_no_keys():
    keys = load_engine_keys(EngineSection(), {})
    assert keys == EngineKeys()
    assert keys.for_path(Route.PAUSE) == keys.for_path(Route.GENERATE) == ""


def test_a_file_wins_over_the_environment(tmp_path):
    file = tmp_path / "key"
    file.write_text("  from-the-file\n")
    environment = {API_KEY_VARIABLE: "from-outside", ADMIN_KEY_VARIABLE: "admin-from-outside"}
    keys = load_engine_keys(EngineSection(api_key_file=str(file)), environment)
    assert keys.for_path(Route.GENERATE) == "from-the-file"
    assert keys.for_path(Route.PAUSE) == "admin-from-outside"
    assert keys.for_path(Route.READY) == ""


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe", "gro\u00df".encode()])
def test_what_is_no_key_is_refused(tmp_path, content):
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"engine\.admin_api_key_file"):
        load_engine_keys(EngineSection(admin_api_key_file=str(file)), {})


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"engine\.api_key_file: cannot read.*no-such"):
        load_engine_keys(EngineSection(api_key_file="no-such"), {})


def test_keys_are_not_printed():
    assert "secret" not in repr(EngineKeys("secret", "secret"))
