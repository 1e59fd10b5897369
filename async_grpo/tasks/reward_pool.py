"""Rewards in other processes, where they can be killed.

A reward may hang, in C code too, or take its process along. It runs on the main thread of a worker
(some verifiers need signals) that is killed past the budget and replaced. One worker call scores a
whole group; only if that call fails is each completion tried alone, so one bad completion costs
its own outcome and nobody else's. Knows nothing of groups or tickets.
"""

import asyncio
import ctypes
import logging
import math
import multiprocessing
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from pickle import PicklingError  # noqa: TID251 -- to name it; the pool's own pipe uses pickle
from typing import Any

from pebble import ProcessExpired, ProcessPool

from async_grpo.errors import RewardError
from async_grpo.interfaces import Reward
from async_grpo.types import Prompt, RewardOutcome

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""For a worker to start and import the reward."""
_MAX_REBUILDS = 3
"""Of a pool in a row that could not score anything."""
_PR_SET_PDEATHSIG = 1
"""Linux prctl: the signal that a process gets when its parent dies."""

Score = tuple[RewardOutcome, float, dict[str, float]]
WorkerScore = tuple[RewardOutcome, float, dict[str, float], str]
"""`Score` and what went wrong."""


class ProcessRewardPool:
    """`interfaces.RewardPool` over worker processes. One event loop owns it.

    Args:
        reward: importable at top level.
        workers: processes.
        timeout_s: budget of one completion, and of the first try of a whole group.
        unparseable_reward: reward of a completion without a readable answer; None: it has none.

    Attributes:
        last_error: newest complaint about the reward, naming the prompt.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        workers: int,
        timeout_s: float,
        unparseable_reward: float | None = None,
    ) -> None:
        self._reward = reward
        self._workers = workers
        self._timeout_s = timeout_s
        self._unparseable_reward = unparseable_reward
        self._pool = self._new_pool()
        self.last_error = ""

    def _new_pool(self) -> Any:
        return ProcessPool(
            self._workers,
            initializer=_start_worker,
            initargs=(self._reward,),
            context=multiprocessing.get_context("spawn"),
        )

    async def start(self) -> None:
        """Start the workers.

        Raises:
            RewardError: the reward cannot be imported there.
        """
        try:
            await self._call(_ready, (), START_TIMEOUT_S)
        except (TimeoutError, ProcessExpired, AttributeError, TypeError, PicklingError) as error:
            raise RewardError(
                f"no worker could load the reward {self._reward!r}; it must be importable by its "
                f"name in another process: {error}"
            ) from error

    async def score(self, completions: Sequence[str], prompt: Prompt) -> list[Score]:
        """(outcome, reward, parts) of each completion.

        The reward is finite if the outcome is `SCORED`, or `UNPARSEABLE` with an
        `unparseable_reward`; else it is NaN, so that no sum can hide it.

        Raises:
            RewardError: the workers die before they can score anything.
        """
        texts = list(completions)
        try:
            found = await self._score(texts, prompt)
        except (TimeoutError, ProcessExpired) as error:
            logger.warning(
                "prompt %d: scoring the group %s; its completions are tried one by one",
                prompt.index,
                "took too long" if isinstance(error, TimeoutError) else f"failed: {error}",
            )
            found = list(await asyncio.gather(*(self._score_alone(text, prompt) for text in texts)))
        complaints = {problem for *_, problem in found if problem}
        if complaints:
            self.last_error = f"prompt {prompt.index}: {min(complaints)}"
            logger.warning("reward of %s", self.last_error)
        return [self._judged(outcome, reward, parts) for outcome, reward, parts, _ in found]

    def _judged(self, outcome: RewardOutcome, reward: float, parts: dict[str, float]) -> Score:
        if outcome is RewardOutcome.UNPARSEABLE and self._unparseable_reward is not None:
            return outcome, self._unparseable_reward, {}
        return outcome, reward, parts

    async def _score_alone(self, text: str, prompt: Prompt) -> WorkerScore:
        try:
            (found,) = await self._score([text], prompt)
        except TimeoutError:
            problem = f"no reward within {self._timeout_s} s"
            return RewardOutcome.TIMEOUT, math.nan, {}, problem
        except ProcessExpired as error:
            problem = f"the reward ended its worker with exit code {error.exitcode}"
            return RewardOutcome.ERROR, math.nan, {}, problem
        return found

    async def _score(self, texts: list[str], prompt: Prompt) -> list[WorkerScore]:
        arguments = (texts, prompt.answer, prompt.metadata)
        found: list[WorkerScore] = await self._call(_score_all, arguments, self._timeout_s)
        return found

    async def _call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float
    ) -> Any:
        """`function` in a worker; a pool that broke (a worker died while idle) is replaced."""
        for _ in range(_MAX_REBUILDS):
            pool = self._pool
            try:
                return await asyncio.wrap_future(
                    pool.schedule(function, args=arguments, timeout=timeout_s)
                )
            except (BrokenExecutor, RuntimeError) as error:
                logger.warning("the reward workers broke (%s); starting new ones", error)
                if self._pool is pool:
                    self._pool = self._new_pool()
                    await asyncio.to_thread(_end, pool)
        raise RewardError(f"the workers of the reward {self._reward!r} die at once; see above")

    async def close(self) -> None:
        """End the workers."""
        await asyncio.to_thread(_end, self._pool)


def _end(pool: Any) -> None:
    pool.stop()
    pool.join()


_reward: Reward | None = None
"""The reward of this worker process."""


def _start_worker(reward: Reward) -> None:
    """First call in a worker: keep the reward, and never outlive the parent or a kill."""
    global _reward
    _reward = reward
    # the pool's own handler of SIGTERM is Python code, which a hang inside C would delay
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # a Ctrl-C at the terminal is the parent's business: it must not look like a failed reward
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _ready() -> None:
    """A worker is up."""


def _score_all(texts: list[str], answer: str, metadata: dict[str, Any]) -> list[WorkerScore]:
    """Scores of one prompt's completions, each with its own outcome."""
    assert _reward is not None
    return [_score_one(_reward, text, answer, metadata) for text in texts]


def _score_one(reward: Reward, text: str, answer: str, metadata: dict[str, Any]) -> WorkerScore:
    try:
        value = reward(text, answer, metadata)
    except BaseException as error:  # noqa: BLE001 -- foreign code: even sys.exit is an "error"
        return RewardOutcome.ERROR, math.nan, {}, f"{type(error).__name__}: {error}"
    if value is None:
        return RewardOutcome.UNPARSEABLE, math.nan, {}, ""
    try:
        parts = (
            {str(name): float(part) for name, part in value.items()}
            if isinstance(value, Mapping)
            else {}
        )
        total = sum(parts.values()) if parts else float(value)  # type: ignore[arg-type] # checked by float()
    except (TypeError, ValueError):
        return RewardOutcome.ERROR, math.nan, {}, f"returned {value!r}, which is no number"
    if not math.isfinite(total):
        return RewardOutcome.ERROR, math.nan, {}, f"returned {value!r}, which is not finite"
    return RewardOutcome.SCORED, total, parts, ""
