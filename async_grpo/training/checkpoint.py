"""What a checkpoint holds: everything that the next train step depends on, and nothing by pickle.

`model.safetensors` under Hugging Face names, `optimizer.safetensors`, `rng.safetensors`, and
`state.json`. It is captured in memory first, and written from there. Groups are not in it: the
replay server's ledger is their snapshot, and `state.json` names the record in it that the
checkpoint belongs to. Knows nothing of directories and hashes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from async_grpo.config.resume import differences, values_digest
from async_grpo.errors import ConfigError
from async_grpo.training.checkpoint_files import Pieces
from async_grpo.training.control import ControlState
from async_grpo.training.host_copy import HostCopy
from async_grpo.training.step import TrainStep
from async_grpo.training.weight_source import PolicyWeights
from async_grpo.types import WeightsName

MODEL, OPTIMIZER, RNG, STATE = (
    "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json",
)  # fmt: skip
FORMAT_VERSION = 1
_CPU, _CUDA, _NUMPY = "torch.cpu", "torch.cuda.", "numpy.mt19937"


class LedgerPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The `Trained` record of the ledger after which the checkpoint was taken."""

    incarnation: int
    step: int
    """the version that the step started from"""
    draw_number: int


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Where the learning rate is."""

    num_updates_done: int
    lr: float
    """of the newest update"""


class NumpyState(msgspec.Struct, frozen=True, kw_only=True):
    """Of numpy's global generator, beside its keys."""

    position: int
    has_gauss: int
    cached_gaussian: float


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """`state.json`, but for numpy's generator."""

    incarnation: int
    policy_version: int
    schedule: Schedule
    ledger: LedgerPosition
    config: dict[str, Any]
    """`config.resume.fixed_values` of the run"""
    control: ControlState = ControlState()

    @property
    def name(self) -> WeightsName:
        """Of the checkpoint."""
        return WeightsName(self.incarnation, self.policy_version)


class _File(msgspec.Struct, frozen=True, kw_only=True):
    format_version: int
    state: CheckpointState
    config_digest: str
    numpy: NumpyState


class Capture:
    """Takes what a checkpoint holds out of the hands of a trainer that goes on. One thread."""

    def __init__(self, weights: PolicyWeights, step: TrainStep) -> None:
        self._weights, self._step = weights, step
        self._model_copy, self._optimizer_copy = HostCopy(), HostCopy()

    def take(self, state: CheckpointState) -> Mapping[str, Pieces]:
        """The files of a checkpoint of the present moment; those of the one before are void."""
        random, numpy_state = _random_state()
        file = _File(
            format_version=FORMAT_VERSION,
            state=state,
            config_digest=values_digest(state.config),
            numpy=numpy_state,
        )
        return {
            MODEL: self._model_copy.take(dict(self._weights.named_tensors())),
            OPTIMIZER: self._optimizer_copy.take(self._step.optimizer.tensors()),
            RNG: [save(random)],
            STATE: [msgspec.json.format(msgspec.json.encode(file), indent=1)],
        }


def read_state(path: Path) -> CheckpointState:
    """What the checkpoint in `path` says of itself, its tensors aside.

    Raises:
        ConfigError: another version of this program wrote it.
    """
    return _read(path).state


def require_same_config(path: Path, state: CheckpointState, fixed: Mapping[str, Any]) -> None:
    """Refuse to continue under another configuration.

    Raises:
        ConfigError: one line for each field of `fixed` that differs.
    """
    if problems := differences(state.config, fixed):
        raise ConfigError([f"checkpoint {path}: {problem}" for problem in problems])


def load_checkpoint(path: Path, weights: PolicyWeights, step: TrainStep) -> CheckpointState:
    """Let model, optimizer and random generators be as they were; `path` is verified before.

    Returns:
        What else it says, for whom it concerns.

    Raises:
        ConfigError: the tensors do not fit the model.
    """
    file = _read(path)
    try:
        copy_tensors(load_file(path / MODEL), dict(weights.named_tensors()))
        step.optimizer.load(load_file(path / OPTIMIZER))
        _set_random_state(load_file(path / RNG), file.numpy)
    except (ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"checkpoint {path} does not fit this model: {error}") from error
    return file.state


def _read(path: Path) -> _File:
    try:
        file = msgspec.json.decode((path / STATE).read_bytes(), type=_File)
        if file.format_version != FORMAT_VERSION:
            raise msgspec.ValidationError(f"it is of format {file.format_version}")
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path / STATE} is not of checkpoint format {FORMAT_VERSION}: {error}"
        ) from error
    return file


@torch.no_grad()
def copy_tensors(found: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """Overwrite the tensors of a model.

    Raises:
        ValueError: `found` are those of another one.
    """
    if set(found) != set(into):
        difference = sorted(set(found) ^ set(into))
        raise ValueError(f"other tensors: {', '.join(difference[:4])}")
    for name, tensor in into.items():
        if (tensor.shape, tensor.dtype) != (found[name].shape, found[name].dtype):
            raise ValueError(f"{name} has another shape or dtype")
        tensor.copy_(found[name])


def _random_state() -> tuple[dict[str, Tensor], NumpyState]:
    """States of the global generators of torch and numpy."""
    tensors = {_CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"{_CUDA}{number}"] = state
    kept: Any = np.random.get_state(legacy=False)  # noqa: NPY002 -- libraries draw from it
    tensors[_NUMPY] = torch.from_numpy(kept["state"]["key"].astype(np.int64))
    return tensors, NumpyState(
        position=int(kept["state"]["pos"]),
        has_gauss=int(kept["has_gauss"]),
        cached_gaussian=float(kept["gauss"]),
    )


def _set_random_state(tensors: Mapping[str, Tensor], numpy_state: NumpyState) -> None:
    torch.set_rng_state(tensors[_CPU])
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            if (name := f"{_CUDA}{number}") in tensors:
                torch.cuda.set_rng_state(tensors[name], number)
    key = tensors[_NUMPY].numpy().astype(np.uint32)
    position, gauss = numpy_state.position, numpy_state.cached_gaussian
    legacy = ("MT19937", key, position, numpy_state.has_gauss, gauss)
    np.random.set_state(legacy)  # noqa: NPY002 -- libraries draw from it
