"""Lines that say whom a process waits for."""

import logging
import threading

import pytest

from async_grpo.transport.waiting import saying


class Lines(logging.Handler):
    def __init__(self, enough: int) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.enough = enough
        self.complete = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if len(self.lines) >= self.enough:
            self.complete.set()


@pytest.fixture
def lines():
    logger = logging.getLogger("async_grpo.transport.waiting")
    handler = Lines(enough=2)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_long_wait_counts_down(lines: Lines) -> None:
    times = iter([100.0, 105.0, 130.0])
    with saying("the cat", 20.0, "run.x_s", interval_s=0.001, clock=lambda: next(times, 130.0)):
        assert lines.complete.wait(10)
    said = len(lines.lines)
    assert lines.lines[:2] == [
        "waiting for the cat; 15 s left (run.x_s)",
        "waiting for the cat; 0 s left (run.x_s)",
    ]
    assert not [thread for thread in threading.enumerate() if thread.name == "waiting"]
    assert len(lines.lines) == said


def test_a_short_wait_says_nothing_and_an_error_passes(lines: Lines) -> None:
    with pytest.raises(ValueError, match="late"), saying("the cat", 20.0, "run.x_s"):
        raise ValueError("late")
    assert lines.lines == []
