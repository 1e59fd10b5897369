"""One piece of work at a time, whose error reaches the thread that asks next."""

import os
import threading
from collections.abc import Callable

import pytest

from async_grpo.errors import AsyncGrpoError, NumericsError
from async_grpo.training.checkpoint_writer import CheckpointWriter


class Work:
    """Goes on until it is let go."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.error, self.ended = error, False

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(30.0)
        self.ended = True
        if self.error is not None:
            raise self.error


def ask_for_ever(writer: CheckpointWriter) -> None:
    while True:
        writer.raise_failure()
        os.sched_yield()


def end_by(error: BaseException, work: Work, *, after_begin: Callable[[], None]) -> None:
    with CheckpointWriter(30.0) as writer:
        writer.start("one", work)
        assert work.begun.wait(30.0)
        after_begin()
        raise error


def test_it_goes_on_beside_the_caller_and_is_timed() -> None:
    times = iter([10.0, 12.5])
    writer, work = CheckpointWriter(30.0, clock=lambda: next(times)), Work()
    writer.start("one", work)
    assert work.begun.wait(30.0)
    writer.raise_failure()
    assert (work.ended, writer.last_s) == (False, None)
    work.may_end.set()
    writer.wait()
    assert (work.ended, writer.last_s) == (True, 2.5)


def test_a_failure_is_raised_once_by_the_next_who_asks() -> None:
    writer, work = CheckpointWriter(30.0), Work(AsyncGrpoError("the disk is full"))
    work.may_end.set()
    writer.start("one", work)
    with pytest.raises(AsyncGrpoError, match="the disk is full"):
        ask_for_ever(writer)
    writer.raise_failure()
    writer.wait()


def test_the_next_work_does_not_begin_after_a_failure() -> None:
    writer, first, second = CheckpointWriter(30.0), Work(AsyncGrpoError("full")), Work()
    first.may_end.set()
    writer.start("one", first)
    with pytest.raises(AsyncGrpoError, match="full"):
        writer.start("two", second)
    assert not second.begun.is_set()


def test_a_wait_has_an_end_that_names_the_work() -> None:
    writer, work = CheckpointWriter(0.01), Work()
    writer.start("checkpoint 1.3", work)
    with pytest.raises(AsyncGrpoError, match=r"checkpoint 1\.3 is not written after another 0\.01"):
        writer.wait()
    work.may_end.set()


def test_an_error_elsewhere_lets_the_work_be_finished(caplog: pytest.LogCaptureFixture) -> None:
    """What ends the run is the other error; a failure of the work is told beside it."""
    for error in (None, AsyncGrpoError("the disk is full")):
        work = Work(error)
        with pytest.raises(NumericsError, match="the loss"):
            end_by(NumericsError("the loss"), work, after_begin=work.may_end.set)
        assert work.ended
    assert [record.message for record in caplog.records] == ["the disk is full"]


def test_a_clean_end_raises_what_the_work_raised() -> None:
    work = Work(AsyncGrpoError("the disk is full"))
    work.may_end.set()
    with pytest.raises(AsyncGrpoError, match="full"), CheckpointWriter(30.0) as writer:
        writer.start("one", work)


def test_a_second_ctrl_c_does_not_wait() -> None:
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        end_by(KeyboardInterrupt(), work, after_begin=lambda: None)
    assert not work.ended
    work.may_end.set()
