"""When checkpoints are written, which one a trainer goes on from, and what the server hears.

The training thread copies the state to host memory; a thread of its own writes the copy, and tells
the server of it only when it is whole. The files are `checkpoint_files`' part, their content is
`checkpoint`'s. Whether a run can go on
from a checkpoint is the replay server's decision: it knows which steps survive.
"""

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from async_grpo.config.resume import fixed_values
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.errors import AsyncGrpoError, ConfigError, PeerError, RemoteError
from async_grpo.interfaces import TrainerReplay
from async_grpo.replay_api.base import ErrorCode
from async_grpo.replay_api.trainer import StartTrainerReply
from async_grpo.training.checkpoint import (
    Capture,
    CheckpointState,
    LedgerPosition,
    Schedule,
    load_checkpoint,
    read_state,
    require_same_config,
)
from async_grpo.training.checkpoint_files import CheckpointError, CheckpointFiles, Pieces
from async_grpo.training.checkpoint_writer import CheckpointWriter
from async_grpo.training.control import ControlState
from async_grpo.training.step import TrainStep
from async_grpo.training.weight_source import PolicyWeights
from async_grpo.types import WeightsName
from async_grpo.weights.cells import Call

logger = logging.getLogger(__name__)

INITIAL = WeightsName(0, 0)
"""No checkpoint: the weights of `policy.model`."""


class Checkpointer:
    """Checkpoints of one trainer. Training thread only.

    Leaving its `with` block finishes what is being written, as `CheckpointWriter` does.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        replay: TrainerReplay,
        call: Call,
        weights: PolicyWeights,
        step: TrainStep,
    ) -> None:
        self._replay, self._call = replay, call
        self._weights, self._step = weights, step
        self._fixed = fixed_values(config)
        self._num_train_steps = config.run.num_train_steps
        self._every = config.trainer.checkpoint_every
        self._updates_per_step = config.trainer.updates_per_step
        self._files = CheckpointFiles(directory, keep=config.trainer.keep_checkpoints)
        self._capture = Capture(weights, step)
        self._writer = CheckpointWriter(config.run.no_progress_timeout_s)
        self._newest = INITIAL
        """written, or being written"""
        self._settled = 0

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.__exit__(kind, error, traceback)

    def start(self) -> tuple[WeightsName, StartTrainerReply]:
        """Become the run's trainer, from the newest whole checkpoint that the run can go on from.

        Returns:
            That checkpoint, yet to be loaded, or `INITIAL`; and the replay server's answer.

        Raises:
            ConfigError: it was written under another configuration, or is past its last step.
            PeerError: another trainer lives, or the run can go on from no checkpoint.
        """
        refusals: list[str] = []
        for name in reversed(self._files.names()):
            try:
                path = self._files.verify(name)
            except CheckpointError as error:
                logger.warning("checkpoint %s is skipped: %s", name, error)
                continue
            require_same_config(path, read_state(path), self._fixed)
            self._require_steps_left(name)
            reply = self._ask(name, refusals)
            if reply is not None:
                self._set_aside_later_than(name)
                return name, reply
        if refusals:
            raise PeerError(
                f"the run can go on from no checkpoint in {self._files.root}: the ledger and they "
                f"are of different runs, or the ledger lost its end; {'; '.join(refusals)}"
            )
        reply = self._ask(INITIAL, refusals)
        if reply is None:
            raise PeerError(
                f"no whole checkpoint is left in {self._files.root}, and the run can no longer "
                f"begin anew: {refusals[0]}"
            )
        self._set_aside_later_than(INITIAL)
        return INITIAL, reply

    def _require_steps_left(self, name: WeightsName) -> None:
        if name.policy_version > self._num_train_steps:
            raise ConfigError(
                f"run.num_train_steps is {self._num_train_steps}, but checkpoint {name} has "
                f"{name.policy_version} steps: it may grow, not shrink"
            )

    def _ask(self, name: WeightsName, refusals: list[str]) -> StartTrainerReply | None:
        try:
            return self._call(self._replay.start(name.policy_version, name.incarnation))
        except RemoteError as error:
            if error.code != ErrorCode.NOT_FOUND:
                raise
            logger.warning("checkpoint %s is skipped: %s", name, error)
            refusals.append(str(error))
            return None

    def _set_aside_later_than(self, chosen: WeightsName) -> None:
        """What was skipped is damaged or undone: nothing may find it again."""
        for name in self._files.names():
            if name > chosen:
                self._files.set_aside(name, f"the run goes on from {chosen} without it")
        self._newest = chosen

    def load(self, name: WeightsName) -> ControlState:
        """Let model, optimizer and random generators be as they were at the checkpoint.

        Returns:
            How alarms and controller were.

        Raises:
            ConfigError: it does not fit the model.
        """
        state = load_checkpoint(self._files.path(name), self._weights, self._step)
        logger.info("checkpoint %s is loaded", name)
        return state.control

    def is_due(self, policy_version: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        return bool(self._every) and policy_version % self._every == 0

    def has(self, policy_version: int) -> bool:
        """Whether there is nothing new to write."""
        return self._newest.policy_version == policy_version

    def save(
        self, name: WeightsName, *, draw_number: int, lr: float, control: ControlState
    ) -> None:
        """Begin a checkpoint after the step that made `name` was acked.

        Returns when the state is copied; waits first for the checkpoint before to be written.

        Raises:
            AsyncGrpoError: the one before cannot be written; those before it are as they were.
            PeerError: another trainer has taken over, or the replay server does not answer.
        """
        state = CheckpointState(
            incarnation=name.incarnation,
            policy_version=name.policy_version,
            schedule=Schedule(num_updates_done=name.policy_version * self._updates_per_step, lr=lr),
            ledger=LedgerPosition(
                incarnation=name.incarnation,
                step=name.policy_version - 1,
                draw_number=draw_number,
            ),
            config=self._fixed,
            control=control,
        )
        self._writer.wait()  # its copy is overwritten now
        files = self._capture.take(state)
        self._newest = name
        self._writer.start(f"checkpoint {name}", lambda: self._write(name, files))

    def wait(self) -> None:
        """Until the newest checkpoint is written.

        Raises:
            AsyncGrpoError: it cannot be.
            PeerError: another trainer has taken over, or the replay server does not answer.
        """
        self._writer.wait()

    def raise_failure(self) -> None:
        """If a checkpoint could not be written; never blocks.

        Raises:
            AsyncGrpoError: as `wait`.
            PeerError: as `wait`.
        """
        self._writer.raise_failure()

    def metrics(self) -> dict[str, float]:
        """Of the newest checkpoint that is known to be written."""
        seconds = self._writer.last_s
        return {} if seconds is None else {"checkpoint/write_s": seconds}

    def _write(self, name: WeightsName, files: Mapping[str, Pieces]) -> None:
        """On the writer's thread: the checkpoint, the pointer, and then what it makes final.

        Killed in between, the server keeps more than is needed, never less.
        """
        try:
            self._files.write(name, files)
            self._settle(self._settled)  # only the run's trainer may move the pointer
            self._files.point_to(name)
            kept = self._files.prune()
        except OSError as error:
            raise AsyncGrpoError(f"checkpoint {name} cannot be written: {error}") from error
        if len(kept) > 1:  # of a single one, the initial weights are the second
            self._settle(kept[0].policy_version)
        logger.info("checkpoint %s is written", name)

    def _settle(self, policy_version: int) -> None:
        self._call(self._replay.settle(policy_version))
        self._settled = policy_version
