"""`async-grpo prepare`: fill `policy.model` by `policy.maker`, once. Knows no maker."""

import logging
import shutil
from pathlib import Path

from async_grpo.config.load import resolve_object
from async_grpo.config.schema import Config
from async_grpo.errors import AsyncGrpoError, ConfigError

logger = logging.getLogger(__name__)


def needs_preparation(config: Config) -> bool:
    """There is a maker and its model is not there yet."""
    return bool(config.policy.maker) and not Path(config.policy.model).exists()


def prepare(config: Config) -> None:
    """Call `policy.maker` if it is needed. An interrupted call leaves no half-made model.

    Raises:
        ConfigError: the maker cannot be imported or called, or made no directory.
    """
    if not needs_preparation(config):
        return
    maker = resolve_object(config.policy.maker, "policy.maker")
    if not callable(maker):
        raise ConfigError(f"policy.maker: {config.policy.maker!r} is not callable")
    target = Path(config.policy.model)
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        maker(partial, config.run.seed, config.policy.maker_options)
    except AsyncGrpoError:
        raise
    except Exception as error:
        logger.debug("policy.maker failed", exc_info=True)
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"policy.maker: {config.policy.maker!r} failed: {what}") from error
    if not partial.is_dir():
        raise ConfigError(f"policy.maker: {config.policy.maker!r} made no directory {partial}")
    partial.rename(target)
