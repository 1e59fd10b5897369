"""The generator's process: what the loops are made of, and a clean end by SIGTERM."""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from async_grpo.config.engine_keys import load_engine_keys
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.errors import ConfigError, PeerError
from async_grpo.generation.client import HttpEngineClient
from async_grpo.generation.sample_log import SampleLog
from async_grpo.generation.starts import engine_starts
from async_grpo.generation.vocabulary import policy_vocab_size
from async_grpo.generation.witness import WitnessLog
from async_grpo.replay.generator_client import GeneratorClient
from async_grpo.roles.generator_loops import Generator
from async_grpo.roles.generator_start import Room
from async_grpo.tasks.held_out import split_task
from async_grpo.tasks.prompts import PromptSource
from async_grpo.tasks.registry import make_reward, make_task
from async_grpo.tasks.reward_pool import ProcessRewardPool
from async_grpo.tasks.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


async def serve(config: Config, *, name: str, config_args: list[str]) -> None:
    """Run a generator until the run is over or the task is cancelled."""
    task = make_task(config.task, config.run.seed)
    tokenizer = load_tokenizer(config.policy.model)
    train_task, held_out = split_task(task, config.eval, config.run.seed)
    prompts = PromptSource(
        train_task,
        tokenizer,
        held_out=held_out,
        chat_template=config.task.chat_template,
        system_prompt=config.task.system_prompt,
    )
    rewards = ProcessRewardPool(
        make_reward(config.task, task),
        workers=config.task.reward_workers,
        timeout_s=config.task.reward_timeout_s,
        unparseable_reward=config.task.unparseable_reward,
    )
    room = Room(config, prompts)
    room.require(config.engine.context_length, "engine.context_length")
    directory = RunDirectory(Path(config.run.output_dir))
    witness = WitnessLog(directory.generator_log(name))
    samples = SampleLog(
        directory.samples, generator=name, max_per_version=config.metrics.max_samples_per_step
    )
    keys = load_engine_keys(config.engine)
    start_engines = engine_starts(config, name, config_args, keys)
    replay = GeneratorClient(config, name=name, dataset=prompts.dataset())
    try:
        with witness, samples:
            await rewards.start()
            welcome = await replay.connect()
            generator = Generator(
                config,
                name,
                run=welcome.run_token,
                replay=replay,
                start_engines=start_engines,
                make_client=partial(
                    HttpEngineClient,
                    control_timeout_s=config.engine.control_timeout_s,
                    vocab_size=policy_vocab_size(config.policy.model),
                    keys=keys,
                ),
                prompts=prompts,
                room=room,
                tokenizer=tokenizer,
                rewards=rewards,
                witness=witness,
                samples=samples,
            )
            await _run_and_leave(generator, replay)
    finally:
        await rewards.close()
        await replay.close()


async def _run_and_leave(generator: Generator, replay: GeneratorClient) -> None:
    reason = "the generator failed"
    try:
        reason = await generator.run()
    except asyncio.CancelledError:
        reason = "asked to stop"
        raise
    finally:
        try:
            await replay.leave(reason)
        except PeerError as error:
            logger.info("left without a goodbye: %s", error)


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """`work`, ended cleanly by SIGTERM."""
    task = asyncio.create_task(work)
    terminated = asyncio.Event()

    def terminate() -> None:
        logger.info("SIGTERM: stopping")
        terminated.set()
        task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        await task
    except asyncio.CancelledError:
        if not terminated.is_set():
            raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def main(config: Config, *, name: str, config_args: list[str]) -> None:
    """Run the generator `name`; returns when cleanly stopped.

    Args:
        config: the run's configuration.
        name: unique among the run's generators.
        config_args: the command line's CONFIG and overrides, for engines started here.

    Raises:
        AsyncGrpoError: see `Generator.run`; ConfigError before anything is started.
    """
    if config.replay.address.endswith(":0"):
        raise ConfigError(
            f"replay.address ({config.replay.address}) must name a port: it is the replay server "
            "that may choose one"
        )
    asyncio.run(_until_terminated(serve(config, name=name, config_args=config_args)))
