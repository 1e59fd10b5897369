import pytest

from async_grpo.config.generation import OnWeightUpdate
from async_grpo.engine_api import Load, PauseMode, ServerInfo
from async_grpo.generation.update_modes import (
    MIN_MEASURED_TOKENS,
    RecomputeCost,
    choose_mode,
    in_place_is_safe,
    kv_tokens,
)

EMBEDDED = ServerInfo(version="5.24.0", engine="embedded")


def cost(*seconds, num_tokens=1000):
    """After retractions that took these seconds."""
    known = RecomputeCost()
    for each in seconds:
        known.measured(num_tokens, each)
    return known


def choose(known, *, setting=OnWeightUpdate.auto, info=EMBEDDED, tokens=1000, interval_s=10.0):
    return choose_mode(setting, info=info, cost=known, num_kv_tokens=tokens, interval_s=interval_s)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_named_mode_is_used_whatever_it_costs(mode):
    setting = OnWeightUpdate(mode)
    assert choose(cost(9, 9, 9), setting=setting) is PauseMode(mode)
    assert choose(cost(), setting=setting, tokens=None, interval_s=None) is PauseMode(mode)


@pytest.mark.parametrize(
    ("seconds", "interval_s", "mode"),
    [
        # 1000 tokens cost 0.4 s: 4 % of 10 s, 8 % of 5 s
        ((0.4, 0.4, 0.4), 10.0, PauseMode.RETRACT),
        ((0.4, 0.4, 0.4), 5.0, PauseMode.IN_PLACE),
        # a measurement can only be too high, so the cheapest counts
        ((9.0, 0.4, 9.0), 10.0, PauseMode.RETRACT),
        # of the newest three
        ((0.4, 9.0, 9.0, 9.0), 10.0, PauseMode.IN_PLACE),
        # exactness is given up on evidence only
        ((9.0, 9.0), 10.0, PauseMode.RETRACT),
        ((), 10.0, PauseMode.RETRACT),
        ((9.0, 9.0, 9.0), None, PauseMode.RETRACT),
    ],
)
def test_auto_retracts_unless_that_was_measured_to_be_dear(seconds, interval_s, mode):
    assert choose(cost(*seconds), interval_s=interval_s) is mode


def test_the_cost_grows_with_what_is_in_flight():
    known = cost(0.4, 0.4, 0.4)
    assert choose(known, tokens=1000) is PauseMode.RETRACT
    assert choose(known, tokens=2000) is PauseMode.IN_PLACE
    assert choose(known, tokens=None) is PauseMode.RETRACT
    assert known.predicted_s(500) == pytest.approx(0.2)


def test_a_handful_of_tokens_measures_nothing():
    known = cost(9, 9, 9, num_tokens=MIN_MEASURED_TOKENS - 1)
    assert known.predicted_s(1000) is None


@pytest.mark.parametrize(
    ("info", "safe"),
    [
        (EMBEDDED, True),
        (ServerInfo(version="0.5.23"), True),
        (ServerInfo(version="0.6.0.post1"), True),
        (ServerInfo(version="0.5.22"), False),
        (ServerInfo(version="0.5.23", tp_size=2), True),
        (ServerInfo(version="0.5.22", tp_size=2), False),
        (ServerInfo(version="0.5.23", dp_size=2), False),
        (ServerInfo(version="0.5.23", pp_size=2), False),
        (ServerInfo(version="main"), False),
    ],
)
def test_in_place_is_chosen_only_where_it_is_known_to_work(info, safe):
    assert in_place_is_safe(info) is safe
    mode = choose(cost(9, 9, 9), info=info)
    assert mode is (PauseMode.IN_PLACE if safe else PauseMode.RETRACT)


def test_kv_tokens_of_a_load():
    assert kv_tokens(Load(token_usage=0.25, max_total_num_tokens=4096)) == 1024
