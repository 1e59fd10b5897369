"""Sequences, staleness functions, rejection and the planner, apart from the vectors."""

import pytest
import torch

from async_grpo.algorithms import rejection
from async_grpo.algorithms.aggregation import Aggregation, denominator, sequence_token_weights
from async_grpo.algorithms.diagnostics import effective_sample_size, one_per_sequence
from async_grpo.algorithms.importance import RatioLevel, log_ratio
from async_grpo.algorithms.proximal import interpolation_weight
from async_grpo.algorithms.sequences import Sequences
from async_grpo.algorithms.staleness import (
    capacity,
    is_fresh,
    sequence_staleness,
    worst_case,
)
from async_grpo.analysis.planner import Workload, emax_lognormal, predict


def test_reductions_over_packed_sequences():
    sequences = Sequences.of(torch.tensor([7, 7, 7, 3, 7, 7]))  # a later run is another one
    values = torch.tensor([1.0, 2.0, 3.0, -4.0, 0.5, 0.25])
    assert sequences.lengths.tolist() == [3, 1, 2]
    assert sequences.sum(values).tolist() == [6.0, -4.0, 0.75]
    assert sequences.mean(values).tolist() == [2.0, -4.0, 0.375]
    assert sequences.min(values).tolist() == [1.0, -4.0, 0.25]
    assert sequences.prefix_sum(values).tolist() == [1.0, 3.0, 6.0, -4.0, 0.5, 0.75]
    assert one_per_sequence(values, sequences).tolist() == [1.0, -4.0, 0.5]


def test_a_sequence_ratio_needs_the_sequences():
    with pytest.raises(ValueError, match="sequences"):
        log_ratio(torch.zeros(2), torch.zeros(2), level=RatioLevel.sequence)


def test_low_precision_log_probs_are_subtracted_in_float32():
    low = torch.tensor([-1.0078125], dtype=torch.bfloat16)
    found = log_ratio(low, torch.tensor([-1.0]))
    assert found.dtype is torch.float32
    assert float(found) == -0.0078125


def test_m2_drops_nothing_that_is_low_enough_and_everything_that_never_is():
    behavior, advantages = torch.zeros(3), torch.ones(3)
    quiet = torch.tensor([0.1, 0.1, 0.1])
    assert not rejection.m2(quiet, behavior, advantages, threshold=0.04).any()
    loud = torch.tensor([1.0, 2.0, 3.0])
    assert rejection.m2(loud, behavior, advantages, threshold=0.04).all()
    against = -loud  # A > 0 and w < 1: the trust region does not bind
    assert not rejection.m2(against, behavior, advantages, threshold=0.04).any()
    every = rejection.M2Tokens.all
    assert rejection.m2(against, behavior, advantages, threshold=0.04, tokens=every).all()
    assert rejection.m2_mean(against, behavior, advantages) == 0.0


def test_weights_of_every_aggregation_add_up_to_a_mean():
    counts = [4, 0, 2]
    for rule, length, total in (
        (Aggregation.token_mean, None, 1.0),
        (Aggregation.sequence_mean_token_mean, None, 1.0),
        (Aggregation.sequence_mean_token_sum, None, 3.0),
        (Aggregation.constant, 3, 1.0),
    ):
        weights = sequence_token_weights(rule, counts)
        summed = sum(w * n for w, n in zip(weights, counts, strict=True))
        assert summed / denominator(rule, counts, length=length) == pytest.approx(total)
    with pytest.raises(ValueError, match="no token"):
        denominator(Aggregation.token_mean, [0, 0])
    with pytest.raises(ValueError, match="length"):
        denominator(Aggregation.constant, counts)


def test_no_weight_or_only_zeros_have_no_effective_size():
    assert effective_sample_size(torch.zeros(0)) != effective_sample_size(torch.zeros(0))
    assert effective_sample_size(torch.zeros(3)) != effective_sample_size(torch.zeros(3))


def test_b055_the_bound_is_inclusive_and_zero_works():
    assert is_fresh(5, 1, 4)
    assert not is_fresh(5, 0, 4)
    assert is_fresh(0, 0, 0)
    assert not is_fresh(1, 0, 0)


def test_b050_capacity_right_after_a_resume_is_the_window():
    assert capacity(100, 100, depth=2, groups_per_step=8) == 24
    assert capacity(0, 0, depth=2, groups_per_step=8) == 24
    assert capacity(99, 100, depth=2, groups_per_step=8) == 16
    assert capacity(90, 100, depth=2, groups_per_step=8) == 0


def test_worst_case_in_all_units():
    found = worst_case(max_staleness=4, publish_every=2, updates_per_step=3)
    assert found == {"steps": 4, "updates": 12, "publishes": 2}


def test_a_sequence_without_a_version_is_not_fresh():
    assert sequence_staleness(7, [-1, 3, 4, -1]).head == 4
    with pytest.raises(ValueError, match="version"):
        sequence_staleness(7, [-1, -1])


def test_fresh_tokens_are_not_interpolated():
    versions = torch.tensor([7, 6, 5, 3, -1])
    alpha = interpolation_weight(versions, policy_version=7, proximal_version=6)
    assert alpha.tolist() == [0.0, 0.0, 0.5, 0.75, 0.0]


@pytest.mark.parametrize(("cv", "n"), [(0.5, 3), (1.0, 8), (2.0, 2)])
def test_expected_maxima_are_those_of_samples(cv, n):
    rng = torch.Generator().manual_seed(0)
    sigma = float(torch.tensor(1 + cv * cv, dtype=torch.float64).log().sqrt())
    normal = torch.randn(200_000, n, generator=rng, dtype=torch.float64)
    sampled = (sigma * normal - sigma * sigma / 2).exp().amax(-1)
    error = float(sampled.std() / len(sampled) ** 0.5)
    assert emax_lognormal(1.0, cv, n) == pytest.approx(float(sampled.mean()), abs=4 * error)


def test_expected_maxima_at_the_ends():
    assert emax_lognormal(3.0, 0.0, 50) == 3.0
    assert emax_lognormal(3.0, 1.0, 1) == pytest.approx(3.0, rel=1e-6)
    with pytest.raises(ValueError, match="cv >= 0"):
        emax_lognormal(1.0, -1.0, 2)


def test_more_run_ahead_never_slows_and_saturates_where_it_says():
    def plan(staleness):
        return predict(
            Workload(
                groups_per_step=32, group_size=8, slots=512, tokens_per_s=50.0,
                mean_tokens=4000.0, cv_tokens=1.0, train_s=60.0, sync_s=2.0, staleness=staleness,
            )
        )  # fmt: skip

    rates = [plan(staleness).groups_per_s for staleness in range(10)]
    assert rates == sorted(rates)
    enough = plan(0).staleness_to_saturate
    assert rates[enough] == rates[-1]
    assert rates[enough - 1] < rates[-1]
    with pytest.raises(ValueError, match="positive"):
        predict(
            Workload(
                groups_per_step=0, group_size=8, slots=512, tokens_per_s=50.0,
                mean_tokens=4000.0, cv_tokens=1.0, train_s=60.0, sync_s=2.0, staleness=1,
            )
        )  # fmt: skip
