"""What a role that is started by hand finds checked and written, as `run` would have done it.

Knows where things lie and what a model directory must hold; nothing of what a role does.
"""

import logging
import os
from pathlib import Path

import msgspec

from async_grpo.config.load import load_config, to_yaml
from async_grpo.config.resume import resume_problems
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.errors import ConfigError
from async_grpo.replay.core.records import EvalClaimed, Made, decode_record
from async_grpo.replay.store import Ledger

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def make_directory(directory: RunDirectory) -> None:
    """Make the run directory and its folders.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        for folder in (directory.root, directory.logs, directory.bound_address.parent):
            folder.mkdir(parents=True, exist_ok=True)
        probe = directory.logs / ".writable"
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)  # another role may have just removed it
    except OSError as error:
        raise ConfigError(
            f"run.output_dir: cannot write to {directory.root}: {error.strerror}; choose a "
            "directory of your own"
        ) from error


def write_config(directory: RunDirectory, config: Config) -> None:
    """Write the resolved configuration, whole or not at all."""
    partial = directory.config.with_suffix(".partial")
    partial.write_text(to_yaml(config), encoding="utf-8")
    partial.replace(directory.config)


def holds_run(directory: RunDirectory) -> bool:
    """Whether a run goes on there, or has begun: a ticket was made.

    What a start left that came to nothing is no run: the next one may have other settings.
    """
    if not directory.ledger.exists():
        return False
    if Ledger.is_in_use(directory.ledger):
        return True
    with directory.ledger.open("rb") as lines:
        try:
            return any(isinstance(decode_record(line), Made | EvalClaimed) for line in lines)
        except msgspec.MsgspecError:
            return True  # the replay server says what is wrong with it


def forget_start(directory: RunDirectory) -> None:
    """Remove what a start left that came to nothing."""
    directory.ledger.unlink(missing_ok=True)
    directory.ledger_snapshot.unlink(missing_ok=True)
    directory.steps.unlink(missing_ok=True)


def continue_or_begin(config: Config) -> None:
    """The replay server's part: a run directory is of one run only.

    A replay server that is started again by hand continues the run that is there.

    Raises:
        ConfigError: the directory holds a run of another configuration.
    """
    directory = RunDirectory(Path(config.run.output_dir))
    make_directory(directory)
    problems: list[str] = []
    if not holds_run(directory):
        forget_start(directory)
    elif directory.config.exists():
        problems = resume_problems(load_config(directory.config), config)
    if problems:
        raise ConfigError(
            [
                f"run.output_dir: {directory.root} holds a run of another configuration",
                *problems,
                "choose another run.output_dir, or start every role as that run was started",
            ]
        )
    write_config(directory, config)


def log_to_file(config: Config, role: str) -> None:
    """From now on the log goes to `logs/<role>.log` too."""
    directory = RunDirectory(Path(config.run.output_dir))
    make_directory(directory)
    handler = logging.FileHandler(directory.role_log(role), encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)


def require_model(config: Config, *, tokenizer: bool) -> None:
    """Refuse a model directory that is not there or not whole, before slow imports.

    A name that could be one of Hugging Face's is left to those who download it.

    Args:
        config: `policy.model` is looked at.
        tokenizer: whether its tokenizer is needed.

    Raises:
        ConfigError: says what is missing.
    """
    model = Path(config.policy.model)
    if not model.exists():
        if config.policy.maker:
            raise ConfigError(
                f"policy.model: {model} is not there yet; make it with `async-grpo prepare CONFIG`"
            )
        local = model.is_absolute() or ".." in model.parts or len(model.parts) > 2
        if local or (len(model.parts) == 2 and model.parent.is_dir()):
            raise ConfigError(f"policy.model: there is no directory {model}")
        return
    names = ["config.json", "tokenizer.json"] if tokenizer else ["config.json"]
    missing = [name for name in names if not (model / name).is_file()]
    if not any(model.glob("*.safetensors")) and not any(model.glob("*.bin")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(
            f"policy.model: {model} has no {', '.join(missing)}; it must be a Hugging Face "
            "directory, as save_pretrained() of the model and of a fast tokenizer writes it"
        )
    for path in [*(model / name for name in names), *model.glob("*.safetensors")]:
        if not os.access(path, os.R_OK):  # safetensors would say that it is not there
            raise ConfigError(f"policy.model: {path} cannot be read by this user, or leads nowhere")
