"""Whole runs with a bad reward or engine: always bad is told, bad at times costs little."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_run import RealRun
from safetensors.torch import load_file, save_file

from async_grpo.analysis.audit import AuditReport
from tests.e2e.mistakes import NULL_LOGPROB, SHORT_LIST, UNEARNED, WRONG_REWARDS, Mistake
from tests.fakes import bad_rewards
from tests.fakes.lying_engine import Lie, LyingEngine, null_logprob, short_list

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@asynccontextmanager
async def engine_process(run: RealRun, *overrides: str) -> AsyncIterator[str]:
    """`async-grpo engine`, started by somebody else; its URL."""
    run.write_config(num_steps=1)
    command = ["engine", str(run.config), f"run.output_dir={run.root}/engine", *overrides]
    with (run.root / "engine.output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "async_grpo", *command, stdout=asyncio.subprocess.PIPE,
            stderr=output,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            line = await process.stdout.readline()
        assert line, (run.root / "engine.output").read_text()
        yield msgspec.json.decode(line)["url"]
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(20):
            await process.wait()


SOON = "run.no_progress_timeout_s=30"
"""A run that can come to nothing ends with this."""


async def assert_told(run: RealRun, mistake: Mistake, url: str = "") -> AuditReport:
    """The run comes to nothing, says why, and its books balance."""
    _, _, *overrides = mistake.command.replace("$", url).split()
    run.start(*overrides, SOON, num_steps=2)
    assert await asyncio.to_thread(run.finish) == mistake.code, run.output()
    text = run.output()
    assert "Traceback" not in text
    position = 0
    for part in mistake.says:
        position = text.find(part, position)
        assert position >= 0, f"{part!r} is not in\n{text}"
    assert run.left_over() == []
    report = run.audit()
    assert report.ok, report.problems
    assert (report.trained, report.steps) == (0, 0)
    return report


@pytest.mark.parametrize("mistake", WRONG_REWARDS, ids=lambda mistake: mistake.what)
async def test_a_reward_that_is_never_right(real_run: RealRun, mistake: Mistake) -> None:
    shutil.copy(bad_rewards.__file__, real_run.root / "mine.py")
    report = await assert_told(real_run, mistake)
    assert set(report.dropped) == {"reward_failed"}


async def test_a_reward_that_no_completion_earns(real_run: RealRun) -> None:
    """Engines work and groups finish, all of them tied: the status line says so long before."""
    shutil.copy(bad_rewards.__file__, real_run.root / "mine.py")
    report = await assert_told(real_run, UNEARNED)
    assert set(report.dropped) == {"no_signal"}


async def test_a_reward_that_is_sometimes_wrong_costs_those_groups(real_run: RealRun) -> None:
    shutil.copy(bad_rewards.__file__, real_run.root / "mine.py")
    settings = ("task.reward=mine:sometimes", "task.reward_timeout_s=0.5")
    real_run.start(*settings, num_steps=8)
    assert await asyncio.to_thread(real_run.finish) == 0, real_run.output()
    report = real_run.audit()
    assert report.ok, report.problems
    assert (report.trained, report.steps) == (64, 8)
    assert set(report.dropped) == {"reward_failed"}
    log = real_run.directory.role_log("generator-0").read_text()
    for complaint in ("ValueError: on purpose", "returned nan", "no reward within 0.5 s"):
        assert complaint in log
    assert real_run.left_over() == []


@pytest.mark.parametrize(
    ("mistake", "change"),
    [(SHORT_LIST, short_list), (NULL_LOGPROB, null_logprob)],
    ids=["short list", "null log-prob"],
)
async def test_an_engine_that_never_answers_right(
    real_run: RealRun, mistake: Mistake, change: Lie
) -> None:
    def lie(number: int, reply: dict[str, Any]) -> None:
        if is_member(reply):
            change(number, reply)

    async with engine_process(real_run) as target, LyingEngine(target, lie) as engine:
        report = await assert_told(real_run, mistake, engine.url)
    assert set(report.dropped) == {"generation_failed"}


async def test_wrong_answers_cost_their_groups_and_nothing_else(real_run: RealRun) -> None:
    num_lies = 0

    def lie(number: int, reply: dict[str, Any]) -> None:
        nonlocal num_lies
        if is_member(reply) and number % 25 == 3:
            (null_logprob if number % 2 else short_list)(number, reply)
            num_lies += 1

    async with engine_process(real_run) as target, LyingEngine(target, lie) as engine:
        real_run.start(f"engine.urls=[{engine.url}]", num_steps=6)
        assert await asyncio.to_thread(real_run.finish) == 0, real_run.output()
    report = real_run.audit()
    assert report.ok, report.problems
    assert (report.trained, report.steps) == (48, 6)
    assert set(report.dropped) == {"generation_failed"}
    assert 0 < report.dropped["generation_failed"] <= num_lies
    log = real_run.directory.role_log("generator-0").read_text()
    assert "log-probs, completion_tokens" in log
    assert "is None" in log


async def test_other_weights_behind_the_url_are_replaced_before_anything_is_sampled(
    real_run: RealRun,
) -> None:
    """The same shapes, so nothing but the numbers tells: version 0 overwrites them."""
    other = real_run.root / "other"
    shutil.copytree(real_run.model, other)
    path = other / "model.safetensors"
    tensors = {name: tensor + 0.1 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    async with engine_process(real_run, f"policy.model={other}") as url:
        real_run.start(f"engine.urls=[{url}]", num_steps=3)
        assert await asyncio.to_thread(real_run.finish) == 0, real_run.output()
    report = real_run.audit()
    assert report.ok, report.problems
    assert report.trained == 24
    # the trainer computes what the engine reported: the weights were the trainer's own
    assert real_run.steps()[0]["kl/behavior_k3"] < 1e-6


async def test_another_shape_behind_the_url_is_told(real_run: RealRun) -> None:
    other = real_run.root / "other"
    make_other_shape(real_run.model, other)
    async with engine_process(real_run, f"policy.model={other}") as url:
        real_run.start(f"engine.urls=[{url}]", num_steps=2)
        assert await asyncio.to_thread(real_run.finish) == 3, real_run.output()
    text = real_run.output()
    assert "Traceback" not in text
    assert "last error of generator-0: generator-0/0#" in text
    assert "update to 1.0 failed in phase 'bucket 0'" in text
    assert real_run.audit().ok
    assert real_run.audit().trained == 0


async def test_an_engine_with_a_wrong_flag_ends_the_run_at_once(real_run: RealRun) -> None:
    """It ends with exit code 2, and would each time: nobody starts it, or its generator, again."""
    python = real_run.root / "python"
    lives = real_run.root / "lives"
    refusal = "launch_server.py: error: unrecognized arguments: --foo"
    python.write_text(f"#!/bin/sh\necho x >> {lives}\necho '{refusal}' >&2\nexit 2\n")
    python.chmod(0o755)
    on_a_cpu = "engine.server_args=[--device=cpu]"
    real_run.start("engine.kind=sglang", f"engine.python={python}", on_a_cpu, num_steps=2)
    assert await asyncio.to_thread(real_run.finish) == 2, real_run.output()
    text = real_run.output()
    assert "generator-0 ended with exit code 2 (configuration)" in text
    assert f"(exit code 2, configuration): {refusal}" in text
    assert lives.read_text().splitlines() == ["x"]
    assert real_run.left_over() == []


def is_member(reply: dict[str, Any]) -> bool:
    """Not a probe of an update: those ask for the log-probs of a prompt."""
    return not reply["meta_info"]["input_token_logprobs"]


def make_other_shape(model: Path, other: Path) -> None:
    """One layer less."""
    shutil.copytree(model, other)
    config = msgspec.json.decode((model / "config.json").read_bytes())
    config["num_hidden_layers"] -= 1
    config["layer_types"].pop()
    (other / "config.json").write_bytes(msgspec.json.encode(config))
