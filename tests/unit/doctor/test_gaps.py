import math

import pytest

from async_grpo.config.policy import DType
from async_grpo.doctor.gaps import LIMITS, gap_between
from async_grpo.errors import GenerationError


def test_a_gap_by_hand():
    gap = gap_between([-1.0, -2.0, -3.0, -4.0], [-1.0, -2.5, -3.0, -3.0])
    assert (gap.mean, gap.max, gap.num_tokens) == (0.375, 1.0, 4)
    assert gap.p99 == pytest.approx(0.985)  # linear between 0.5 and 1.0


@pytest.mark.parametrize("dtype", list(DType))
def test_a_log_prob_that_is_not_a_number_is_no_noise(dtype):
    assert LIMITS[dtype].hold(gap_between([-1.0] * 200, [-1.0] * 200))
    assert not LIMITS[dtype].hold(gap_between([-1.0] * 199 + [math.nan], [-1.0] * 200))


def test_a_wrong_temperature_is_above_every_limit():
    # one token of two: log 0.9 at temperature 1 is log 0.958 at 0.7
    odds = math.log(9)
    at_1, at_07 = -math.log1p(math.exp(-odds)), -math.log1p(math.exp(-odds / 0.7))
    gap = gap_between([at_1] * 50, [at_07] * 50)
    assert all(not limits.hold(gap) for limits in LIMITS.values())


@pytest.mark.parametrize("found", [[], [-1.0, -2.0]])
def test_other_numbers_of_log_probs_are_refused(found):
    with pytest.raises(GenerationError, match="to compare with 1"):
        gap_between(found, [-1.0])
