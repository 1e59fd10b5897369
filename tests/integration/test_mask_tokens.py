"""`over_age: mask_tokens` through the real replay server, the real trainer role and the audit."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.analysis.audit import audit
from async_grpo.config.load import to_yaml
from async_grpo.config.policy import DType, PolicySection
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.config.staleness import OverAge, StalenessSection
from async_grpo.config.trainer import TrainerSection
from async_grpo.generation.witness import WitnessLog
from async_grpo.replay.server import ReplayServer
from async_grpo.roles import trainer
from async_grpo.training.feed import LoopThread
from async_grpo.types import (
    Completion,
    DropReason,
    FinishReason,
    Rollout,
    RolloutGroup,
    Segment,
    Ticket,
    WeightsName,
)
from tests.fakes.replay_harness import at_address, replay_config
from tests.fakes.scripted_generator import ScriptedGenerator
from tests.fakes.tiny_policy import VOCAB, tiny_module

STEPS, SIZE, LENGTH, LAG = 5, 2, 6, 2


def old_tokens(ticket: Ticket, version: int) -> int:
    """Of each completion: two of every six; in each fifth group five, too many to be trained."""
    if version < LAG:
        return 0
    return 5 if ticket.group_id % 5 == 4 else 2


def group_of(ticket: Ticket, weights: WeightsName) -> RolloutGroup:
    """Some of its first tokens were sampled LAG versions before the others."""
    rng = np.random.default_rng(ticket.group_id)
    rollouts = []
    for member in range(SIZE):
        count = old_tokens(ticket, weights.policy_version)
        segments = [Segment(weights, LENGTH - count)]
        if count:
            before = WeightsName(weights.incarnation, weights.policy_version - LAG)
            segments.insert(0, Segment(before, count))
        completion = Completion(
            prompt_token_ids=np.arange(3, dtype=np.int32),
            token_ids=rng.integers(0, VOCAB, LENGTH, dtype=np.int32),
            behavior_logprobs=-rng.random(LENGTH, dtype=np.float32) - 1,
            segments=segments,
            finish_reason=FinishReason.STOP,
            temperature=1.0,
        )
        rollouts.append(Rollout([completion], float(member)))
    return RolloutGroup(ticket.group_id, ticket.attempt, ticket.prompt_index, rollouts)


def masking_config(root: Path) -> Config:
    """S = D = 1: what is two versions old when it is inserted is too old for every step."""
    config = replay_config(root / "run", group_size=SIZE, num_tokens=LENGTH)
    return replace(
        config,
        run=replace(config.run, num_train_steps=STEPS),
        policy=PolicySection(model=str(root / "model"), dtype=DType.float64),
        staleness=StalenessSection(max_staleness=1, over_age=OverAge.mask_tokens),
        trainer=TrainerSection(lr=1e-3, tokens_per_microbatch=30),
        metrics=replace(config.metrics, tensorboard=False),
    )


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("others")
    yield thread
    thread.close()


async def start(config: Config, box: dict[str, Any]) -> str:
    """The server; its address."""
    box["server"] = ReplayServer(config)
    box["serving"] = asyncio.create_task(box["server"].serve())
    address: str = box["server"].address
    return address


async def generate(config: Config, witness: WitnessLog, box: dict[str, Any]) -> None:
    """The generator, with a log for the audit."""

    def made(ticket: Ticket, weights: WeightsName) -> RolloutGroup:
        group = group_of(ticket, weights)
        witness.sent(group)
        return group

    box["generating"] = asyncio.create_task(ScriptedGenerator(config, made).run())


async def stop(box: dict[str, Any]) -> None:
    """Both, within a deadline."""
    await asyncio.wait_for(box["generating"], 10)
    box["server"].stop("the test is over")
    await asyncio.wait_for(box["serving"], 10)
    box["server"].close()


def test_no_token_beyond_the_bound_is_trained_and_each_is_counted(
    tmp_path: Path, loop: LoopThread
) -> None:
    tiny_module().save_pretrained(tmp_path / "model")
    config, directory = masking_config(tmp_path), RunDirectory(tmp_path / "run")
    box: dict[str, Any] = {}
    with ExitStack() as stack:
        witness = stack.enter_context(WitnessLog(directory.generator_log("g0")))
        config = at_address(config, loop.call(start(config, box)))
        directory.config.write_text(to_yaml(config))
        loop.call(generate(config, witness, box))
        trainer.main(config)
        loop.call(stop(box))

    steps = [json.loads(line) for line in directory.steps.read_text().splitlines()]
    metrics = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    report = audit(directory.root)
    assert report.problems == []
    assert max(step["max_staleness"] for step in steps) <= 1
    assert [line["staleness/max"] for line in metrics] == [s["max_staleness"] for s in steps]
    masked = [sum(group["num_over_age"] for group in step["groups"]) for step in steps]
    assert [line["tokens/over_age"] for line in metrics] == masked
    assert set(masked) <= {0, 2 * SIZE, 4 * SIZE}  # two per completion, of none to both groups
    assert report.tokens["over_age"] == sum(masked) > 0
    assert report.tokens["trained"] == sum(line["tokens/trained"] for line in metrics)
    assert set(report.dropped) <= {DropReason.STALE}
    assert report.dropped["stale"] > 0  # five of six tokens were too old
