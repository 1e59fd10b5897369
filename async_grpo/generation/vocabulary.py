"""Size of the policy's vocabulary, from its `config.json`; without transformers."""

from pathlib import Path

import msgspec
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from async_grpo.errors import ConfigError

CONFIG_FILE = "config.json"


class _TextConfig(msgspec.Struct):
    vocab_size: int | None = None


class _ModelConfig(msgspec.Struct):
    vocab_size: int | None = None
    text_config: _TextConfig | None = None
    """of a model with several modalities"""


def policy_vocab_size(model: str) -> int | None:
    """Number of ids that the model knows; None if its directory has no `config.json`.

    Args:
        model: `policy.model`, a directory or a Hugging Face name.

    Raises:
        ConfigError: the file cannot be had or read, or does not say.
    """
    path = Path(model) / CONFIG_FILE
    if not Path(model).is_dir():
        try:
            path = Path(hf_hub_download(model, CONFIG_FILE))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise ConfigError(f"policy.model: no {CONFIG_FILE} of {model!r}: {error}") from error
    elif not path.exists():
        return None
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_ModelConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"policy.model: cannot read {path}: {error}") from error
    size = config.vocab_size or (config.text_config and config.text_config.vocab_size)
    if not size:
        raise ConfigError(f"policy.model: {path} names no vocab_size")
    return size
