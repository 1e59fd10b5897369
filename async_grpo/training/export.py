"""`async-grpo export`: what a run has trained, as a Hugging Face directory. Knows no objective."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from async_grpo.config.load import load_config
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.errors import ConfigError
from async_grpo.training.model import load_policy, save_policy

logger = logging.getLogger(__name__)


def export(run_dir: Path, out: Path) -> str:
    """Write model, tokenizer, chat template and generation config to `out`.

    Returns:
        Where the weights came from, for people.

    Raises:
        ConfigError: no run directory, nothing was trained yet, or `out` is not empty.
    """
    directory = RunDirectory(run_dir)
    if not directory.config.is_file():
        raise ConfigError(f"{directory.config} is missing: {run_dir} is no run directory")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists; name a new directory")
    config = load_config(directory.config)
    if not directory.final_model.is_dir():
        raise ConfigError(
            f"{run_dir} has no {directory.final_model.name} yet: it is written after the last step"
        )
    _save(config, directory.final_model, out)
    return f"{directory.final_model}, policy_version {config.run.num_train_steps}"


def _save(config: Config, source: Path, out: Path) -> None:
    """Load `source`, so that a broken one is not passed on, and save it as `out`."""
    section = replace(config.policy, model=str(source))
    chunk_tokens = config.trainer.logprob_chunk_tokens
    policy = load_policy(section, torch.device("cpu"), chunk_tokens=chunk_tokens, trainable=False)
    policy.module.config.use_cache = True  # switched off for training only
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_dir():
        out.rmdir()
    save_policy(policy, str(source), out)
