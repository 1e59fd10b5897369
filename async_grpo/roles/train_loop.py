"""The trainer's steps: take a batch, step, witness, ack, publish, report, checkpoint.

What the parts are and how they are started is `roles.trainer`'s business.
"""

import logging
from dataclasses import dataclass

from async_grpo.algorithms.staleness import is_fresh
from async_grpo.config.schema import Config
from async_grpo.config.staleness import OverAge
from async_grpo.errors import NumericsError, PeerError, PeerLost
from async_grpo.interfaces import TrainerReplay
from async_grpo.metrics.states import StateClock
from async_grpo.metrics.writers import MetricsWriter
from async_grpo.training.checkpointing import Checkpointer
from async_grpo.training.control import Control, DepthChange
from async_grpo.training.evaluations import EvaluationFeed
from async_grpo.training.feed import Batch, GroupFeed, LoopThread
from async_grpo.training.progress import Progress
from async_grpo.training.selection import SelectionWindow
from async_grpo.training.step import StepOutcome, TrainStep
from async_grpo.training.step_metrics import ess_by_lag, group_metrics, token_metrics
from async_grpo.training.weight_source import PolicyWeights
from async_grpo.training.witness import StepWitness
from async_grpo.types import WeightsName
from async_grpo.weights.publisher import WeightPublisher

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainParts:
    """What the loop works with, all of one trainer process."""

    config: Config
    step: TrainStep
    weights: PolicyWeights
    replay: TrainerReplay
    loop: LoopThread
    clock: StateClock
    publisher: WeightPublisher
    feed: GroupFeed
    progress: Progress
    evaluations: EvaluationFeed
    checkpoints: Checkpointer
    control: Control


class TrainLoop:
    """The training thread's loop."""

    def __init__(self, parts: TrainParts) -> None:
        self._parts, self._config, self._clock = parts, parts.config, parts.clock
        self._progress = parts.progress
        self._selection = SelectionWindow()
        self._step_ended_s = wall_s(parts.clock)
        self._draw_number = 0
        self._lr = 0.0

    def run(self, writer: MetricsWriter, witness: StepWitness) -> None:
        """Train steps until the last, or until a stop is requested between two.

        Raises:
            NumericsError: an alarm whose action is to stop; a checkpoint is written.
        """
        config, parts = self._config, self._parts
        self._set_depth(parts.control.start())
        while self._progress.step < config.run.num_train_steps:
            with self._clock.during("waiting"):
                batch = self._take()
            if batch is None:
                return
            if not self._progress.training_since_s:
                self._progress.training_since_s = wall_s(self._clock)
            self._require_fresh(batch)
            in_queue_s = batch.in_queue_s()
            with self._clock.during("working"):
                outcome = parts.step.apply(
                    batch.groups,
                    batch.train_version,
                    weights=[leased.keep_weight for leased in batch.leased],
                    lr_scale=parts.control.lr_scale,
                )
            witness.write(self._progress.incarnation, batch, config.staleness.max_staleness)
            with self._clock.during("syncing"):
                self._ack_and_publish(batch)
            with self._clock.during("working"):
                self._report(writer, batch, outcome, in_queue_s)
            self._draw_number, self._lr = batch.draw_number, outcome.lr
            parts.checkpoints.raise_failure()
            if parts.checkpoints.is_due(self._progress.step):
                self.checkpoint()
            self._stop_if_told()

    def _take(self) -> Batch | None:
        """The next batch; None: stop."""
        try:
            return self._parts.feed.take(self._config.run.no_progress_timeout_s)
        except PeerLost as error:
            result = self._parts.publisher.last_result
            if result is None or not result.failures:
                raise
            raise PeerLost(
                f"{error}; the last publish failed: {'; '.join(result.failures)}"
            ) from error

    def _stop_if_told(self) -> None:
        """The last step ends the run anyway."""
        reason, step = self._parts.control.stop_reason, self._progress.step
        if reason and step < self._config.run.num_train_steps:
            self.finish_checkpoint()
            raise NumericsError(
                f"stopped after {step} train steps by {reason}; the checkpoint of version {step} "
                "is written: --resume goes on from it, with another threshold or action if need be"
            )

    def checkpoint(self) -> None:
        """Begin one, unless the newest is of this version."""
        version = self._progress.step
        checkpoints = self._parts.checkpoints
        if not checkpoints.has(version):
            name = WeightsName(self._progress.incarnation, version)
            with self._clock.during("checkpointing"):
                checkpoints.save(
                    name,
                    draw_number=self._draw_number,
                    lr=self._lr,
                    control=self._parts.control.snapshot(),
                )

    def finish_checkpoint(self) -> None:
        """Have one of this version on the disk."""
        self.checkpoint()
        with self._clock.during("checkpointing"):
            self._parts.checkpoints.wait()

    def _require_fresh(self, batch: Batch) -> None:
        bound = self._config.staleness.max_staleness
        masks = self._config.staleness.over_age is OverAge.mask_tokens
        for group in batch.groups:
            newest = max(group.weights_tokens(), default=None)
            if newest and newest.policy_version > batch.train_version:
                raise PeerError(
                    f"the replay server handed out group {group.group_id}/{group.attempt} of "
                    f"{newest} for a step from version {batch.train_version}: these weights do not "
                    "exist yet"
                )
            deciding = (max if masks else min)(group.weights_tokens(), default=None)
            if deciding and not is_fresh(batch.train_version, deciding.policy_version, bound):
                raise PeerError(
                    f"the replay server handed out group {group.group_id}/{group.attempt} of "
                    f"{deciding} for a step from version {batch.train_version}: older than "
                    f"staleness.max_staleness={bound}"
                )

    def _ack_and_publish(self, batch: Batch) -> None:
        groups = [(group.group_id, group.attempt) for group in batch.groups]
        parts = self._parts
        parts.loop.call(parts.replay.ack(batch.train_version, batch.draw_number, groups))
        parts.feed.acked(batch.draw_number)
        version, last = batch.train_version + 1, self._config.run.num_train_steps
        if version % self._config.weights.publish_every == 0 or version == last:
            name = WeightsName(self._progress.incarnation, version)
            parts.publisher.publish(name, parts.weights)

    def _report(
        self, writer: MetricsWriter, batch: Batch, outcome: StepOutcome, in_queue_s: list[float]
    ) -> None:
        version, parts = batch.train_version, self._parts
        values = group_metrics(batch.groups, batch.generated, in_queue_s)
        values |= self._selection.step(batch.groups, batch.generated)
        values |= token_metrics(outcome, batch.groups, version, self._config.algorithm)
        values |= self._control(values, outcome, version)
        seconds = self._clock.seconds()
        now = sum(seconds.values())
        step_s = now - self._step_ended_s
        self._step_ended_s = now
        values |= {
            "step": version,
            "policy_version": version + 1,
            "incarnation": self._progress.incarnation,
            "time/wall_s": now,
            "time/step_s": step_s,
            "tokens/trained_per_s": values["tokens/trained"] / step_s,
        }
        values |= {
            f"time/{state}_s": seconds.get(state, 0.0)
            for state in ("starting", "working", "waiting", "syncing", "checkpointing")
        }
        result = parts.publisher.last_result
        if result is not None:
            values |= result.metrics()
        values |= parts.checkpoints.metrics()
        values |= parts.evaluations.take()
        writer.write(version, values)
        self._progress.add(values)
        logger.info(
            "step %d: reward %.3f, staleness %.2f (max %d), %.0f tokens/s, grad norm %.3g",
            version + 1, values["reward/mean"], values["staleness/mean"], values["staleness/max"],
            values["tokens/trained_per_s"], values["grad_norm"],
        )  # fmt: skip

    def _control(
        self, values: dict[str, float], outcome: StepOutcome, version: int
    ) -> dict[str, float]:
        """Let alarms and controller see the step's figures and do what they decide."""
        control, lags = self._parts.control, {}
        if control.wants_lags:
            lags = ess_by_lag(outcome, version, self._config.algorithm)
        metrics, change = control.step(values, lags)
        self._set_depth(change)
        return metrics

    def _set_depth(self, change: DepthChange | None) -> None:
        if change is not None:
            parts = self._parts
            parts.loop.call(parts.replay.set_depth(change.depth, change.reason))

    def report_last_evaluations(self, writer: MetricsWriter) -> None:
        """Lines of their own, behind the last step's, for evaluations that ended after it."""
        last, timeout_s = self._config.run.num_train_steps, self._config.eval.timeout_s
        for values in self._parts.evaluations.rest(last, timeout_s):
            values |= {
                "step": last,
                "policy_version": last,
                "incarnation": self._progress.incarnation,
                "time/wall_s": wall_s(self._clock),
            }
            writer.write(last, values)


def wall_s(clock: StateClock) -> float:
    """Seconds since the clock was started."""
    return sum(clock.seconds().values())
