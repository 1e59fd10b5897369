"""Writes checkpoints on a thread of its own, one at a time, while training goes on.

A failure is raised on the thread that asks next. Knows neither files nor tensors.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from types import TracebackType
from typing import Self

from async_grpo.errors import AsyncGrpoError
from async_grpo.interfaces import Clock

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """At most one piece of work. Training thread only.

    On leaving its `with` block, the work under way is finished first; but not after a second
    Ctrl-C, or another end that is no error: then the process ends in the middle, as by a kill.

    Args:
        timeout_s: longest wait for a piece of work.
        clock: seconds.
    """

    def __init__(self, timeout_s: float, *, clock: Clock = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._what = ""
        self._job: Future[float] | None = None
        self.last_s: float | None = None
        """seconds of the newest that was finished"""

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Do `work` in the background, after the one before.

        Raises:
            Exception: of the work before.
        """
        self.wait()
        self._what = what
        self._job = Future()
        # a daemon: ThreadPoolExecutor's would hold up the end of a process that is to end at once
        threading.Thread(
            target=self._run, args=(self._job, work), name="checkpoint", daemon=True
        ).start()

    def wait(self) -> None:
        """Until nothing is under way.

        Raises:
            Exception: of the work.
            AsyncGrpoError: it takes too long.
        """
        if self._job is not None:
            if not wait_for([self._job], self._timeout_s).done:
                raise AsyncGrpoError(
                    f"{self._what} is not written after another {self._timeout_s:g} s "
                    "(run.no_progress_timeout_s): does its disk still answer?"
                )
            self._take_result(self._job)

    def raise_failure(self) -> None:
        """If the work has failed by now; never blocks.

        Raises:
            Exception: of the work.
        """
        if self._job is not None and self._job.done():
            self._take_result(self._job)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            try:
                self.wait()
            except (AsyncGrpoError, CancelledError) as failure:  # `error` ends the run
                logger.error("%s", failure)

    def _take_result(self, job: Future[float]) -> None:
        self._job = None
        self.last_s = job.result()

    def _run(self, job: Future[float], work: Callable[[], None]) -> None:
        started = self._clock()
        try:
            work()
        except BaseException as error:  # noqa: BLE001 -- it belongs to the training thread
            job.set_exception(error)
        else:
            job.set_result(self._clock() - started)
