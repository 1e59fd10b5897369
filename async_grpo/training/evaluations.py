"""Results of evaluation rounds for the training thread.

A coroutine on the replay client's loop asks for them in the background; the training thread takes
what has come, and at the end of the run waits for the last version's. Knows neither prompts nor
models.
"""

import asyncio
import logging
import queue
import time
from collections.abc import Iterator

from async_grpo.errors import PeerError
from async_grpo.interfaces import Clock, TrainerReplay
from async_grpo.replay_parts import EvalResult
from async_grpo.training.feed import LoopThread

logger = logging.getLogger(__name__)


class EvaluationFeed:
    """Results of this incarnation's rounds. `start`, `take`, `rest`, `request_stop`: any thread.

    Args:
        replay: used on `loop` only.
        loop: where the asking runs.
        incarnation: of this trainer; results of earlier ones were reported by them.
        clock: seconds.
    """

    def __init__(
        self,
        replay: TrainerReplay,
        loop: LoopThread,
        incarnation: int,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._replay, self._loop, self._incarnation = replay, loop, incarnation
        self._clock = clock
        self._inbox: queue.SimpleQueue[EvalResult | PeerError | None] = queue.SimpleQueue()
        self._task: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._loop.post(self._spawn)

    def _spawn(self) -> None:
        self._task = asyncio.ensure_future(self._ask())

    async def _ask(self) -> None:
        seen = 0
        while True:
            try:
                results = await self._replay.evaluations(seen)
            except PeerError as error:
                self._inbox.put(error)
                return
            seen += len(results)
            for result in results:
                if result.weights.incarnation == self._incarnation:
                    self._inbox.put(result)

    def take(self) -> dict[str, float]:
        """Metrics of the oldest result that was not taken yet; empty if there is none.

        Raises:
            PeerError: the replay server failed.
        """
        try:
            item = self._inbox.get_nowait()
        except queue.Empty:
            return {}
        if isinstance(item, PeerError):
            raise item
        return {} if item is None else metrics_of(item)

    def rest(self, last_version: int, timeout_s: float) -> Iterator[dict[str, float]]:
        """Metrics of every further result, until `last_version`'s, a stop, or `timeout_s`.

        Raises:
            PeerError: the replay server failed.
        """
        deadline = self._clock() + timeout_s
        version = -1
        while version != last_version:
            try:
                item = self._inbox.get(timeout=max(0.0, deadline - self._clock()))
            except queue.Empty:
                logger.warning(
                    "no evaluation of version %d within eval.timeout_s (%g s): do generators "
                    "run, and did its weights go live?",
                    last_version,
                    timeout_s,
                )
                return
            if isinstance(item, PeerError):
                raise item
            if item is None:
                return
            version = item.weights.policy_version
            yield metrics_of(item)

    def request_stop(self) -> None:
        """`rest` waits no longer. Safe in a signal handler."""
        self._inbox.put(None)

    def close(self) -> None:
        """End the asking."""
        self._loop.call(self._cancel())

    async def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def metrics_of(result: EvalResult) -> dict[str, float]:
    """The result under the names of metrics/registry.py; without a completion, no means."""
    values = {
        "eval/policy_version": float(result.weights.policy_version),
        "eval/prompts": float(result.num_evaluated),
        "eval/failed_prompts": float(result.num_failed),
    }
    if result.num_completions:
        values["eval/reward_mean"] = result.reward_sum / result.num_completions
        values["eval/length_mean"] = result.num_tokens / result.num_completions
    num_named = sum(count for _, count in result.weights_tokens)
    if num_named:
        values["eval/sampled_version_mean"] = (
            sum(name.policy_version * count for name, count in result.weights_tokens) / num_named
        )
    return values
