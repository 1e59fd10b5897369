"""When checkpoints are written, which one a trainer goes on from, and what the server hears.

The files are `checkpoint_files`' part, their content is `checkpoint`'s. Whether a run can go on
from a checkpoint is the replay server's decision: it knows which steps survive.
"""

import logging

from safetensors import SafetensorError

from async_grpo.config.resume import fixed_values
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.errors import AsyncGrpoError, ConfigError, PeerError, RemoteError
from async_grpo.interfaces import TrainerReplay
from async_grpo.replay_api.base import ErrorCode
from async_grpo.replay_api.trainer import StartTrainerReply
from async_grpo.training.checkpoint import (
    CheckpointState,
    LedgerPosition,
    Schedule,
    load_checkpoint,
    read_state,
    require_same_config,
    save_checkpoint,
)
from async_grpo.training.checkpoint_files import CheckpointError, CheckpointFiles
from async_grpo.training.control import ControlState
from async_grpo.training.step import TrainStep
from async_grpo.training.weight_source import PolicyWeights
from async_grpo.types import WeightsName
from async_grpo.weights.cells import Call

logger = logging.getLogger(__name__)

INITIAL = WeightsName(0, 0)
"""No checkpoint: the weights of `policy.model`."""


class Checkpointer:
    """Checkpoints of one trainer. Training thread only."""

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
        self._newest = INITIAL
        self._settled = 0

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
        """Write a checkpoint after the step that made `name` was acked, then remove old ones.

        Raises:
            AsyncGrpoError: it cannot be written; the ones before are as they were.
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
        try:
            self._files.write(
                name, lambda path: save_checkpoint(path, state, self._weights, self._step)
            )
            self._settle(self._settled)  # only the run's trainer may move the pointer
            self._files.point_to(name)
            kept = self._files.prune()
        except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
            raise AsyncGrpoError(f"checkpoint {name} cannot be written: {error}") from error
        self._newest = name
        if len(kept) > 1:  # of a single one, the initial weights are the second
            self._settle(kept[0].policy_version)
        logger.info("checkpoint %s is written", name)

    def _settle(self, policy_version: int) -> None:
        self._call(self._replay.settle(policy_version))
        self._settled = policy_version
