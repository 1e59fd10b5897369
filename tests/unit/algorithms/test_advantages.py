import pytest
import torch

from async_grpo.algorithms import advantages
from async_grpo.algorithms.advantages import EpsPlacement


def rewards(*values):
    return torch.tensor(values, dtype=torch.float64)


PER_GROUP = {
    "z_score": lambda r: advantages.z_score(r, eps=0.0),
    "z_score inside": lambda r: advantages.z_score(r, eps=0.0, placement=EpsPlacement.inside),
    "z_score sample": lambda r: advantages.z_score(r, eps=0.0, correction=1),
    "mean_only": advantages.mean_only,
    "rloo": advantages.rloo,
    "maxrl": advantages.maxrl,
    "opo": lambda r: advantages.opo(r, torch.arange(1, r.shape[-1] + 1)),
    "batch_scaled": lambda r: advantages.batch_scaled([r], eps=0.0)[0],
    "whitened": lambda r: advantages.whitened([r], eps=0.0)[0],
}


@pytest.mark.parametrize("rule", PER_GROUP)
@pytest.mark.parametrize(
    "values", [(3.0,), (0.0,), (0.1,) * 7, (-1.0, -1.0), (1e8,) * 4, (0.1 + 0.2, 0.3 + 1e-17)]
)
def test_b008_no_spread_is_exactly_zero_and_never_nan(rule, values):
    """A group of one, all equal, by every rule and without any eps."""
    assert PER_GROUP[rule](rewards(*values)).tolist() == [0.0] * len(values) or len(set(values)) > 1


def test_b008_the_definition_of_the_std_is_pinned():
    group = rewards(1, 0, 0, 0)
    assert advantages.z_score(group, eps=0.0)[0] == pytest.approx(3**0.5)
    assert advantages.z_score(group, eps=0.0, correction=1)[0] == pytest.approx(1.5)
    assert advantages.z_score(rewards(5.0), eps=0.0, correction=1).tolist() == [0.0]


def test_b009_groups_do_not_see_each_other():
    easy, hard = rewards(1, 1, 1), rewards(0, 0, 0)
    for rule in (advantages.batch_scaled, advantages.whitened):
        assert [v.tolist() for v in rule([easy, hard], eps=1e-8)] == [[0.0] * 3] * 2


@pytest.mark.parametrize("rule", PER_GROUP)
def test_large_rewards_keep_their_differences(rule):
    """1e8 beside 1e8 + 1: in float64 the difference is all there."""
    found = PER_GROUP[rule](rewards(1e8, 1e8 + 1))
    assert found.isfinite().all()
    assert found[0] < 0 < found[1]


def test_a_spread_too_small_to_square_is_none():
    tiny = rewards(0.0, 1e-200)
    assert advantages.z_score(tiny, eps=0.0).tolist() == [0.0, 0.0]
    assert advantages.batch_scaled([tiny], eps=0.0)[0].tolist() == [0.0, 0.0]


def test_min_std_silences_noise():
    noisy = rewards(1, 1, 1, 1 + 1e-4)
    assert advantages.z_score(noisy, eps=1e-8)[3] > 1.7
    assert advantages.z_score(noisy, eps=1e-8, min_std=1e-3).tolist() == [0.0] * 4


def test_b010_a_member_without_a_reward_leaves_the_statistics():
    group, valid = rewards(1, 0, float("nan"), 1), torch.tensor([True, True, False, True])
    found = advantages.with_members(group, valid, advantages.mean_only(group[valid]))
    assert found.tolist() == pytest.approx([1 / 3, -2 / 3, 0.0, 1 / 3])


def test_rloo_is_the_mean_of_the_others():
    found = advantages.rloo(rewards(1, 0, 0.5, 0))
    assert found.tolist() == pytest.approx([1 - 1 / 6, 0 - 0.5, 0.5 - 1 / 3, 0 - 0.5])


def test_maxrl_without_success_is_zero():
    assert advantages.maxrl(rewards(0, -1, 0)).tolist() == [0.0] * 3


def test_many_groups_at_once_equal_one_by_one():
    several = torch.stack([rewards(1, 0, 0.5), rewards(2, 2, 2), rewards(0, 1, 3)])
    for rule in (advantages.mean_only, advantages.rloo, advantages.maxrl):
        assert torch.equal(rule(several), torch.stack([rule(group) for group in several]))
