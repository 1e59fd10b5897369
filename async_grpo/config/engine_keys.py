"""The keys that guard an engine, for the engine that asks for them and the client that sends them.

They come from a file or from the environment, never from the configuration itself, which is printed
and stored.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from async_grpo.config.engine import EngineSection
from async_grpo.engine_api import ADMIN_PATHS, OPEN_PATHS
from async_grpo.errors import ConfigError

API_KEY_VARIABLE = "ASYNC_GRPO_ENGINE_API_KEY"
ADMIN_KEY_VARIABLE = "ASYNC_GRPO_ENGINE_ADMIN_API_KEY"


@dataclass(frozen=True)
class EngineKeys:
    """SGLang's `--api-key` and `--admin-api-key`; empty: none."""

    api: str = ""
    admin: str = ""

    def for_path(self, path: str) -> str:
        """The one key that opens `path`; empty: it is open.

        With an admin key, admin paths take that key and no other; the API key never opens them.
        """
        if path in OPEN_PATHS:
            return ""
        if path in ADMIN_PATHS and self.admin:
            return self.admin
        return self.api

    def __repr__(self) -> str:
        return f"EngineKeys(api={bool(self.api)}, admin={bool(self.admin)})"


def load_engine_keys(
    section: EngineSection, environment: Mapping[str, str] = os.environ
) -> EngineKeys:
    """The keys of `section`: from its files, else from the environment, else none.

    Raises:
        ConfigError: a file cannot be read, or a key is not one word of printable ASCII.
    """
    return EngineKeys(
        api=_key("api_key_file", section.api_key_file, API_KEY_VARIABLE, environment),
        admin=_key(
            "admin_api_key_file", section.admin_api_key_file, ADMIN_KEY_VARIABLE, environment
        ),
    )


def _key(field: str, file: str, variable: str, environment: Mapping[str, str]) -> str:
    if not file:
        key, where = environment.get(variable, ""), f"environment variable {variable}"
        if not key:
            return ""
    else:
        where = f"engine.{field}: {file}"
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"engine.{field}: cannot read a key from {file!r}: {error}"
            ) from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where}: a key must be one word of printable ASCII characters")
    return key
