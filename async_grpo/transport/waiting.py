"""Say whom this process waits for, and for how long still, while it waits.

A role that was started before its peers must not look like one that hangs. Knows nothing of what is
waited for.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from async_grpo.interfaces import Clock

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Between two lines."""


@contextmanager
def saying(
    whom: str,
    timeout_s: float,
    setting: str,
    *,
    interval_s: float = INTERVAL_S,
    clock: Clock = time.monotonic,
) -> Iterator[None]:
    """Log a line every `interval_s` until the block ends; a short wait logs nothing.

    Works around a blocking wait and around an `await` alike: the lines come from a thread.

    Args:
        whom: what is waited for, e.g. "the replay server at tcp://host:1".
        timeout_s: when the wait ends by itself; the caller enforces it.
        setting: the field that holds `timeout_s`.
        interval_s: between lines.
        clock: seconds.
    """
    ended = threading.Event()
    deadline = clock() + timeout_s

    def say() -> None:
        while not ended.wait(interval_s):
            left_s = max(0.0, deadline - clock())
            logger.info("waiting for %s; %.0f s left (%s)", whom, left_s, setting)

    speaker = threading.Thread(target=say, name="waiting", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()
