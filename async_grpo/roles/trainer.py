"""The trainer role: draw, step, witness, ack, publish, until the last step.

Groups arrive one draw ahead (`training.feed`), weights leave in the background
(`weights.publisher`); the main thread below only trains. One rank for now.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.devices.choice import resolve_device
from async_grpo.errors import ConfigError, PeerError
from async_grpo.interfaces import TrainerReplay
from async_grpo.metrics.states import StateClock
from async_grpo.metrics.writers import MetricsWriter
from async_grpo.replay.monitor_client import MonitorClient
from async_grpo.replay.trainer_client import TrainerClient
from async_grpo.replay_parts import Role
from async_grpo.roles.train_loop import TrainLoop, TrainParts
from async_grpo.training.checkpointing import INITIAL, Checkpointer
from async_grpo.training.control import Control
from async_grpo.training.evaluations import EvaluationFeed
from async_grpo.training.feed import FeedSettings, GroupFeed, LoopThread
from async_grpo.training.model import PolicyModel, load_policy, save_policy
from async_grpo.training.progress import Progress
from async_grpo.training.self_test import check_model
from async_grpo.training.step import TrainStep
from async_grpo.training.weight_source import PolicyWeights
from async_grpo.training.witness import StepWitness
from async_grpo.types import WeightsName
from async_grpo.weights.backend import settings_in_force
from async_grpo.weights.model_facts import require_steady_positions
from async_grpo.weights.publisher import WeightPublisher

logger = logging.getLogger(__name__)


def main(config: Config) -> None:
    """Train until `run.num_train_steps`, or until SIGTERM; both return normally.

    Raises:
        KeyboardInterrupt: Ctrl-C; the first one only after the step under way and a checkpoint.
        ConfigError: the address has no port, there is more than one rank, or the model is unfit.
        PeerError: the replay server or the groups failed to come within their deadlines.
        NumericsError: a loss or gradient norm was not finite, or an alarm stopped the run.
    """
    if config.replay.address.endswith(":0"):
        raise ConfigError(
            f"replay.address is {config.replay.address}: a trainer needs the port that the replay "
            "server listens on (it writes its address to replay/address in the run directory)"
        )
    with ExitStack() as stack:
        signals = stack.enter_context(_StopSignals())
        stack.enter_context(_one_rank())
        loop = LoopThread("replay-client")
        stack.callback(loop.close)
        clock = StateClock("starting")
        trainer = _load(config)
        client = loop.call(_connect(config))
        stack.callback(lambda: loop.call(client.close()))
        _train(config, trainer, client, loop, clock, signals)


class _Terminated(BaseException):
    """SIGTERM came before the first draw. No Exception: libraries that load models catch those."""


class _StopSignals:
    """What SIGTERM and Ctrl-C do: end the start-up, or the run after the step under way.

    A second Ctrl-C ends it at once. Handles nothing outside the main thread, where Python allows no
    handlers.
    """

    def __init__(self) -> None:
        self.request_stop: Callable[[], None] | None = None
        """set once there are steps to finish"""
        self._interrupted = False
        self._before: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted or self.request_stop is None:
                raise KeyboardInterrupt
            self._interrupted = True
        if self.request_stop is None:
            raise _Terminated
        self.request_stop()

    def __enter__(self) -> "_StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is _Terminated:
            logger.info("SIGTERM before the first step")
        if kind is None and self._interrupted:
            raise KeyboardInterrupt  # for the exit code
        return kind is _Terminated


@dataclass(slots=True)
class _Trainer:
    """The model and what steps it."""

    policy: PolicyModel
    step: TrainStep
    weights: PolicyWeights


def _load(config: Config) -> _Trainer:
    """Model, optimizer and start-up checks."""
    torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.run.seed)
    device = resolve_device(config.trainer.device)
    policy = load_policy(config.policy, config.trainer, device)
    context_length = config.engine.context_length
    require_steady_positions(policy.text_config, context_length)
    if config.trainer.self_test:
        check_model(policy, seed=config.run.seed, context_length=context_length)
    reference = None
    if config.algorithm.kl_coef > 0:
        reference = load_policy(config.policy, config.trainer, device, trainable=False)
    step = TrainStep(
        policy,
        config.algorithm,
        config.trainer,
        num_train_steps=config.run.num_train_steps,
        reference=reference,
        max_staleness=config.staleness.max_staleness,
    )
    weights = PolicyWeights(policy, config.weights, seed=config.run.seed)
    return _Trainer(policy, step, weights)


@contextmanager
def _one_rank() -> Iterator[None]:
    """torch.distributed with this process alone, by torchrun's store or our own.

    Raises:
        ConfigError: torchrun started more than one rank.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise ConfigError(
            f"torchrun started {world_size} trainer ranks; this version trains on one"
        )
    dist.init_process_group("gloo", store=_own_store(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _own_store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]  # exported at run time


async def _connect(config: Config) -> TrainerClient:
    client = TrainerClient(config)
    try:
        await client.connect()
    except BaseException:
        await client.close()
        raise
    return client


def _train(
    config: Config,
    trainer: _Trainer,
    client: TrainerClient,
    loop: LoopThread,
    clock: StateClock,
    signals: _StopSignals,
) -> None:
    """The whole run after loading."""
    directory = RunDirectory(Path(config.run.output_dir))
    replay: TrainerReplay = client
    checkpoints = Checkpointer(config, directory, replay, loop.call, trainer.weights, trainer.step)
    found, started = checkpoints.start()
    first = found.policy_version
    progress = Progress(incarnation=started.incarnation, step=first)
    logger.info("incarnation %d starts from version %d", started.incarnation, first)
    device = trainer.policy.device
    publisher = WeightPublisher(
        replay, loop.call, settings_in_force(config, device),
        run_directory=Path(config.run.output_dir), device=device,
    )  # fmt: skip
    feed = GroupFeed(
        replay,
        loop,
        FeedSettings(
            first_draw_number=started.next_draw_number,
            first_version=first,
            num_train_steps=config.run.num_train_steps,
            heartbeat_s=config.replay.heartbeat_s,
        ),
        status=lambda: progress.status(clock),
        on_wishes=publisher.republish,
    )
    evaluations = EvaluationFeed(replay, loop, started.incarnation)
    control = Control(config, started.pipeline_depth, noise=trainer.weights.noise)
    reason = "failed"
    with ExitStack() as stack:
        stack.callback(lambda: loop.call(client.leave(reason)))
        stack.callback(publisher.close)
        stack.callback(loop.cancel_calls)
        stack.callback(feed.close)
        stack.callback(evaluations.close)
        stack.enter_context(checkpoints)
        signals.request_stop = _all(feed.request_stop, evaluations.request_stop)
        board = directory.tensorboard if config.metrics.tensorboard else None
        writer = stack.enter_context(MetricsWriter(directory.metrics, board, first_step=first))
        witness = stack.enter_context(StepWitness(directory.steps))
        feed.start()
        if found is not INITIAL:
            control.restore(checkpoints.load(found))  # heartbeats go on meanwhile
        if config.eval.every:
            evaluations.start()
        with clock.during("syncing"):
            publisher.publish(WeightsName(started.incarnation, first), trainer.weights)
        parts = TrainParts(
            config=config, step=trainer.step, weights=trainer.weights, replay=replay, loop=loop,
            clock=clock, publisher=publisher, feed=feed, progress=progress,
            evaluations=evaluations, checkpoints=checkpoints, control=control,
        )  # fmt: skip
        steps = TrainLoop(parts)
        steps.run(writer, witness)
        steps.finish_checkpoint()
        if progress.step == config.run.num_train_steps:
            publisher.wait()
            if config.eval.every:
                with clock.during("waiting"):
                    steps.report_last_evaluations(writer)
            save_policy(trainer.policy, config.policy.model, directory.final_model)
            progress.log_summary(clock, config.staleness.max_staleness)
            loop.call(_log_generator_shares(config))
            reason = f"all {progress.step} train steps are done"
            loop.call(replay.finish(reason))
        else:
            reason = f"stopped after {progress.step} of {config.run.num_train_steps} train steps"
        logger.info("%s", reason)


def _all(*callbacks: Callable[[], None]) -> Callable[[], None]:
    def call_all() -> None:
        for callback in callbacks:
            callback()

    return call_all


async def _log_generator_shares(config: Config) -> None:
    """How much of their time the generators worked, by their own accounting."""
    monitor = MonitorClient(config, name="trainer-summary")
    try:
        await monitor.connect()
        stats = await monitor.stats()
    except PeerError as error:
        logger.warning("no figures of the generators: %s", error)
        return
    finally:
        await monitor.close()
    for peer in stats.peers:
        if peer.role is Role.GENERATOR and peer.status is not None and peer.status.seconds:
            seconds = peer.status.seconds
            total = sum(seconds.values())
            share = seconds.get("generating", 0.0) / total
            logger.info("%s: generating %.0f %% of %.1f s", peer.name, 100 * share, total)
