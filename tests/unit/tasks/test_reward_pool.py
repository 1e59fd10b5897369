import asyncio
import math
import os
import signal
import sys
import types
from contextlib import asynccontextmanager

import pytest

from async_grpo.errors import RewardError
from async_grpo.tasks.reward_pool import ProcessRewardPool
from async_grpo.types import Prompt, RewardOutcome
from tests.fakes import bad_rewards

PROMPT = Prompt(index=3, text="q", token_ids=[1], answer="42")
SCORED, UNPARSEABLE = RewardOutcome.SCORED, RewardOutcome.UNPARSEABLE
ERROR, TIMEOUT = RewardOutcome.ERROR, RewardOutcome.TIMEOUT


@asynccontextmanager
async def pool_of(reward, *, timeout_s=30.0, workers=1, unparseable_reward=None):
    pool = ProcessRewardPool(
        reward, workers=workers, timeout_s=timeout_s, unparseable_reward=unparseable_reward
    )
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def test_each_completion_has_its_own_outcome():
    texts = ["42", "41", "raise", "nan", "infinite", "none", "parts", "words", "no parts", "true"]
    async with pool_of(bad_rewards.by_text) as pool:
        scores = await pool.score(texts, PROMPT)
        assert "on purpose" in pool.last_error or "returned" in pool.last_error
    assert [outcome for outcome, _, _ in scores] == [
        SCORED, SCORED, ERROR, ERROR, ERROR, UNPARSEABLE, SCORED, ERROR, ERROR, SCORED,
    ]  # fmt: skip
    assert [reward for outcome, reward, _ in scores if outcome is SCORED] == [1.0, 0.0, 1.25, 1.0]
    assert scores[6][2] == {"format": 0.25, "answer": 1.0}
    assert all(math.isnan(reward) for outcome, reward, _ in scores if outcome is not SCORED)


async def test_a_ctrl_c_at_the_terminal_is_no_failed_reward():
    async with pool_of(bad_rewards.pid) as pool:
        ((_, pid, _),) = await pool.score(["a"], PROMPT)
        os.kill(int(pid), signal.SIGINT)
        assert await pool.score(["a"], PROMPT) == [(SCORED, pid, {})]


async def test_an_unparseable_completion_gets_the_reward_of_the_configuration():
    async with pool_of(bad_rewards.by_text, unparseable_reward=-0.5) as pool:
        assert await pool.score(["none"], PROMPT) == [(UNPARSEABLE, -0.5, {})]


@pytest.mark.parametrize(
    ("bad", "outcome"),
    [("hang", TIMEOUT), ("hang in C", TIMEOUT), ("die", ERROR), ("exit", ERROR), ("killed", ERROR)],
)
async def test_a_bad_completion_costs_nobody_else(bad, outcome):
    # long enough for a good one on a busy machine; only those that hang wait for it
    timeout_s = 1.5 if outcome is TIMEOUT else 30.0
    async with pool_of(bad_rewards.by_text, timeout_s=timeout_s) as pool:
        scores = await pool.score(["42", bad, "41"], PROMPT)
        assert [found for found, _, _ in scores] == [SCORED, outcome, SCORED]
        # the worker was replaced
        assert await pool.score(["42"], PROMPT) == [(SCORED, 1.0, {})]


async def test_a_reward_runs_on_the_main_thread_of_its_process():
    async with pool_of(bad_rewards.needs_main_thread) as pool:
        assert await pool.score(["x"], PROMPT) == [(SCORED, 1.0, {})]


async def test_a_worker_that_dies_while_idle_is_replaced():
    async with pool_of(bad_rewards.pid) as pool:
        ((_, before, _),) = await pool.score(["x"], PROMPT)
        os.kill(int(before), signal.SIGKILL)
        ((outcome, after, _),) = await pool.score(["x"], PROMPT)
    assert outcome is SCORED
    assert after != before


async def test_a_cancelled_score_does_not_hang_the_pool():
    async with pool_of(bad_rewards.by_text) as pool:
        scoring = asyncio.create_task(pool.score(["hang"], PROMPT))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await scoring
        assert await pool.score(["42"], PROMPT) == [(SCORED, 1.0, {})]


@pytest.mark.parametrize("where", ["nowhere", "not_in_the_worker"])
async def test_a_reward_that_no_worker_can_import_is_named(where, monkeypatch):
    def reward(completion, answer, metadata):
        return 1.0

    if where == "not_in_the_worker":
        module = types.ModuleType("not_in_the_worker")
        module.reward = reward
        reward.__module__, reward.__qualname__ = "not_in_the_worker", "reward"
        monkeypatch.setitem(sys.modules, "not_in_the_worker", module)
    pool = ProcessRewardPool(reward, workers=1, timeout_s=1.0)
    try:
        with pytest.raises(RewardError, match="reward at 0x"):
            await pool.start()
    finally:
        await pool.close()
