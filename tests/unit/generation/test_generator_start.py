"""The wait before a generator's first ticket."""

import logging
from types import SimpleNamespace

import pytest

from async_grpo.config.load import load_config
from async_grpo.errors import ConfigError, PeerLost
from async_grpo.roles.generator_start import REFUSED_S, FirstTicket, Room
from async_grpo.types import Prompt, TicketKind


def slot_with(**state: object) -> SimpleNamespace:
    return SimpleNamespace(**{"refused": False, "failed": False, **state})


def waiting(
    *slots: SimpleNamespace, timeout_s: float = 100.0, now: float = 0.0, update_error: str = ""
) -> FirstTicket:
    times = iter([0.0])
    return FirstTicket(lambda: slots, timeout_s, lambda: next(times, now), lambda: update_error)


async def test_without_an_engine_its_last_error_is_told():
    slot = SimpleNamespace(
        engine=None, last_error="g/0#1: connection refused", refused=False, failed=False
    )
    with pytest.raises(PeerLost, match=r"waited 100 s in vain for an engine .*connection refused"):
        await waiting(slot, now=101.0).wait(0.001)


async def test_without_weights_the_trainer_is_waited_for():
    slot = slot_with(engine=object(), last_error="")
    with pytest.raises(PeerLost, match=r"in vain for a trainer to publish its first weights$"):
        await waiting(slot, now=101.0).wait(0.001)
    with pytest.raises(PeerLost, match=r"publish its first weights \(g/0#1: over 5 s\)$"):
        await waiting(slot, now=101.0, update_error="g/0#1: over 5 s").wait(0.001)


async def test_a_full_buffer_is_no_reason_to_give_up(caplog: pytest.LogCaptureFixture):
    first = waiting(slot_with(engine=object(), last_error=""), now=1e9)
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
    slot = slot_with(engine=object(), last_error="")
    first = FirstTicket(lambda: [slot], 100.0, lambda: next(times), str)
    with caplog.at_level(logging.INFO), pytest.raises(PeerLost):
        await first.wait(0.001)
    assert "waiting for a trainer to publish its first weights; 90 s left" in caplog.text


async def test_engines_that_all_refuse_the_run_end_it_long_before_its_patience_does():
    """An engine that does not come up may still come; one that says no is told at once."""
    refusing = slot_with(engine=None, last_error="g/0#1: another vocabulary", refused=True)
    with pytest.raises(PeerLost, match=r"every engine refuses this run: .*another vocabulary"):
        await waiting(refusing, timeout_s=900.0, now=REFUSED_S + 1).wait(0.001)
    starting = slot_with(engine=None, last_error="g/1#1: connection refused")
    with pytest.raises(PeerLost, match="waited 900 s in vain"):
        await waiting(refusing, starting, timeout_s=900.0, now=901.0).wait(0.001)


class Prompts:
    """Longest prompts of given lengths, of training and held out."""

    def __init__(self, train: int, held_out: int = 0) -> None:
        self.lengths = {TicketKind.TRAIN: train, TicketKind.EVAL: held_out}

    def longest(self, kind: TicketKind = TicketKind.TRAIN) -> Prompt:
        return Prompt(index=7, text="", token_ids=[0] * self.lengths[kind], answer="")


def room_of(tmp_path, prompts, *overrides):
    path = tmp_path / "config.yaml"
    path.write_text("run: {output_dir: o, num_train_steps: 1}\npolicy: {model: m}\n")
    settings = ["task.name=reverse", "generation.max_new_tokens=20", *overrides]
    return Room(load_config(path, settings), prompts)


def test_a_context_must_hold_the_longest_prompt_and_its_completion(tmp_path):
    room = room_of(tmp_path, Prompts(10))
    room.require(30, "engine.context_length")
    room.require(None, "a server that does not say")
    message = r"x \(29\) is below the 10 tokens of prompt 7 plus generation.max_new_tokens \(20\)"
    with pytest.raises(ConfigError, match=message):
        room.require(29, "x")


def test_a_held_out_prompt_needs_room_too(tmp_path):
    prompts = Prompts(10, held_out=15)
    room_of(tmp_path, prompts).require(30, "x")
    with pytest.raises(ConfigError, match=r"15 tokens .*generation.max_new_tokens \(20\)"):
        room_of(tmp_path, prompts, "eval.every=5").require(30, "x")
    shorter = room_of(tmp_path, prompts, "eval.every=5", "eval.max_new_tokens=10")
    shorter.require(30, "x")
    with pytest.raises(ConfigError, match=r"15 tokens .*eval.max_new_tokens \(16\)"):
        room_of(tmp_path, prompts, "eval.every=5", "eval.max_new_tokens=16").require(30, "x")
