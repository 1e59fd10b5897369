"""`async-grpo export`: what a run has trained, as a Hugging Face directory. Knows no objective."""

import logging
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from async_grpo.config.load import load_config
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.config.trainer import TrainerSection
from async_grpo.errors import ConfigError
from async_grpo.training.checkpoint import MODEL, copy_tensors
from async_grpo.training.checkpoint_files import CheckpointError, CheckpointFiles
from async_grpo.training.model import PolicyModel, load_policy, save_policy
from async_grpo.weights.tensor_list import travelling_tensors

logger = logging.getLogger(__name__)


def export(run_dir: Path, out: Path) -> str:
    """Write model, tokenizer, chat template and generation config to `out`.

    Taken from the newest checkpoint; if that is damaged, or there is none, from `final_model`; else
    from the newest checkpoint that is whole.

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
    checkpoint = _choose_checkpoint(directory, config)
    has_final = directory.final_model.is_dir()
    if checkpoint is None and not has_final:
        raise ConfigError(
            f"{run_dir} has no checkpoint and no {directory.final_model.name} yet: they are "
            "written after trainer.checkpoint_every steps and after the last one"
        )
    base = str(directory.final_model) if has_final else config.policy.model
    policy = _load(config, base)
    if checkpoint is not None:
        _take_weights(policy, checkpoint)
    policy.module.config.use_cache = True  # type: ignore[union-attr]  # off for training only
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_dir():
        out.rmdir()
    save_policy(policy, base, out)
    return str(checkpoint or directory.final_model)


def _choose_checkpoint(directory: RunDirectory, config: Config) -> Path | None:
    """The newest whole one; None: `final_model` is newer, or there is none."""
    files = CheckpointFiles(directory, keep=config.trainer.keep_checkpoints)
    for name in reversed(files.names()):
        try:
            return files.verify(name)
        except CheckpointError as error:
            logger.warning("checkpoint %s is passed over: %s", name, error)
        if directory.final_model.is_dir():  # written after every checkpoint that is left
            return None
    return None


def _load(config: Config, model: str) -> PolicyModel:
    """The model in `model`, loaded, so that a broken one is not passed on."""
    section = replace(config.policy, model=model)
    return load_policy(section, TrainerSection(), torch.device("cpu"), trainable=False)


def _take_weights(policy: PolicyModel, checkpoint: Path) -> None:
    """Let `policy` have the weights of a checkpoint.

    Raises:
        ConfigError: they are of another model.
    """
    own = travelling_tensors(policy.module)
    try:
        copy_tensors(load_file(checkpoint / MODEL), own)
    except (ValueError, SafetensorError) as error:
        raise ConfigError(f"checkpoint {checkpoint} does not fit policy.model: {error}") from error
