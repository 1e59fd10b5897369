"""One thread that owns the model: pausing, weight updates, prompt log-probs, partial outputs.

Jobs run one after another in the order they were given, as in SGLang's scheduler: while one waits
for a broadcast, later ones queue. A daemon thread, so that a job stuck in a collective cannot keep
the process from exiting (`concurrent.futures` joins its threads at exit).
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class ModelThread:
    """Runs jobs of one event loop in its thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    async def run(self, job: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `job`; what it raises is raised here.

        A caller that is cancelled leaves: the job runs nevertheless.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def deliver(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # T may itself be Optional

        def work() -> None:
            try:
                result = job(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 -- handed to the caller, whoever it is
                outcome: tuple[T | None, BaseException | None] = (None, error)
            else:
                outcome = (result, None)
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, *outcome)

        self._jobs.put(work)
        return await done

    def close(self, *, timeout_s: float) -> bool:
        """End after the jobs given so far; False if they take longer than that."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
