"""A blocking call in a thread of its own, which may be left behind.

A collective whose peer never comes need not return, whatever deadline it was given. So whoever
waits for one waits for its future instead. The thread is a daemon: `concurrent.futures` joins its
own threads at exit, and a stuck one would keep the process.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], *, name: str) -> Future[T]:
    """Start `work` at once; the future has its result, or what it raised.

    Args:
        work: takes no arguments.
        name: of the thread.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 -- handed to whoever waits
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
