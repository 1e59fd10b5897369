"""The wait before a generator's first ticket."""

import logging
from types import SimpleNamespace

import pytest

from async_grpo.errors import PeerLost
from async_grpo.roles.generator_start import FirstTicket


def waiting(*slots: SimpleNamespace, timeout_s: float = 100.0, now: float = 0.0) -> FirstTicket:
    times = iter([0.0])
    return FirstTicket(lambda: slots, timeout_s, lambda: next(times, now))


async def test_without_an_engine_its_last_error_is_told():
    slot = SimpleNamespace(engine=None, last_error="g/0#1: connection refused")
    with pytest.raises(PeerLost, match=r"waited 100 s in vain for an engine .*connection refused"):
        await waiting(slot, now=101.0).wait(0.001)


async def test_without_weights_the_trainer_is_waited_for():
    slot = SimpleNamespace(engine=object(), last_error="")
    with pytest.raises(PeerLost, match="in vain for a trainer to publish"):
        await waiting(slot, now=101.0).wait(0.001)


async def test_a_full_buffer_is_no_reason_to_give_up(caplog: pytest.LogCaptureFixture):
    first = waiting(SimpleNamespace(engine=object(), last_error=""), now=1e9)
    first.trainer_seen = True

    class Arrives(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            first.arrived.set()

    logger = logging.getLogger("async_grpo.roles.generator_start")
    handler = Arrives()
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO):
            await first.wait(0.001)
    finally:
        logger.removeHandler(handler)
    assert "the buffer is full" in caplog.text


async def test_the_countdown(caplog: pytest.LogCaptureFixture):
    times = iter([0.0, 10.0, 200.0])
    slot = SimpleNamespace(engine=object(), last_error="")
    first = FirstTicket(lambda: [slot], 100.0, lambda: next(times))
    with caplog.at_level(logging.INFO), pytest.raises(PeerLost):
        await first.wait(0.001)
    assert "waiting for a trainer to publish its first weights; 90 s left" in caplog.text
