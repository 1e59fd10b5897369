"""Every objective on the whole train step: its gradient does not depend on the batch's layout."""

import math

import pytest
import torch

from async_grpo.algorithms.surrogates import SurrogateInput
from async_grpo.config.algorithm import Aggregation, AlgorithmSection, Denominator, preset_section
from async_grpo.config.objective import objective_problems
from async_grpo.config.presets import Preset
from async_grpo.config.trainer import TrainerSection
from async_grpo.errors import ConfigError, NumericsError
from async_grpo.metrics.registry import checked
from async_grpo.training.step import TrainStep
from async_grpo.training.step_metrics import token_metrics
from async_grpo.types import FinishReason
from tests.fakes.tiny_policy import random_groups, tiny_policy

HERE = "tests.unit.training.test_step_objectives"


def near_groups(num_groups=3, *, gap=0.3):
    """Groups whose behavior policy is near the tiny policy, so that ratios are near 1."""
    groups = random_groups(num_groups, version=1)
    step = TrainStep(tiny_policy(), AlgorithmSection(), TrainerSection(), num_train_steps=10)
    outcome = step.apply(groups, 1)
    rng = torch.Generator().manual_seed(5)
    completions = [r.sequences[0] for group in groups for r in group.rollouts]
    for sequence, completion in zip(outcome.sequences, completions, strict=True):
        slots = slice(sequence.first_slot, sequence.first_slot + sequence.num_trained)
        exact = outcome.tokens.policy_logprobs[slots]
        noise = gap * torch.randn(exact.shape, generator=rng, dtype=exact.dtype)
        completion.behavior_logprobs = (exact + noise).float().numpy()
    return groups


def step_of(groups, algorithm, *, version=1, policy=None, **trainer):
    policy = policy or tiny_policy()
    settings = TrainerSection(
        **({"lr": 1e-2, "tokens_per_microbatch": 10_000, "max_grad_norm": 1e9} | trainer)
    )
    reference = tiny_policy(seed=3) if algorithm.kl_coef else None
    step = TrainStep(policy, algorithm, settings, num_train_steps=10, reference=reference)
    outcome = step.apply(groups, version)
    state = step.optimizer._adamw.state
    first = [state[p]["exp_avg"].flatten() / 0.1 for p in policy.module.parameters()]
    return torch.cat(first), outcome


def limited(preset, **fields):
    section = preset_section(preset, **fields)
    if section.aggregation is Aggregation.constant:
        section.length_limit = 9
    assert not list(objective_problems(section, "algorithm"))
    return section


def assert_scaled(found, expected):
    """The model's norms compute in float32, so another scale is another rounding."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def assert_invariant(groups, section):
    expected, outcome = step_of(groups, section)
    assert expected.abs().max() > 1e-6
    for order, budget in ((slice(None, None, -1), 10_000), (slice(None), 1), (slice(None), 30)):
        found, other = step_of(groups[order], section, tokens_per_microbatch=budget)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert other.losses[0] == pytest.approx(outcome.losses[0], abs=1e-9)
    return outcome


@pytest.mark.parametrize("preset", Preset)
def test_permuting_splitting_and_padding_change_no_gradient(preset):
    assert_invariant(near_groups(gap=0.01 if preset is Preset.geo_rs else 0.3), limited(preset))


@pytest.mark.parametrize("aggregation", Aggregation)
@pytest.mark.parametrize("denominator", Denominator)
def test_b003_b006_every_aggregation_and_denominator_under_rejection(aggregation, denominator):
    section = limited(
        "icepop", behavior_weight_floor=0.8, behavior_weight_cap=1.3, reject_m2=0.05,
        aggregation=aggregation, denominator=denominator,
    )  # fmt: skip
    outcome = assert_invariant(near_groups(), section)
    kept = outcome.tokens.kept
    assert 0 < int(kept.sum()) < len(kept)


def test_b012_the_denominator_counts_what_was_drawn_or_what_was_kept():
    groups = near_groups()
    fields = {"behavior_weight_floor": 0.8, "behavior_weight_cap": 1.3}
    original, outcome = step_of(groups, limited("icepop", **fields))
    kept, _ = step_of(groups, limited("icepop", denominator="kept", **fields))
    share = float(outcome.tokens.kept.double().mean())
    assert_scaled(kept * share, original)


def test_b005_the_constant_aggregation_is_the_sum_over_its_length():
    groups = near_groups()
    mean, _ = step_of(groups, limited("dr_grpo", aggregation="token_mean"))
    constant, outcome = step_of(groups, limited("dr_grpo"))
    tokens, sequences = len(outcome.tokens.kept), len(outcome.sequences)
    assert_scaled(constant * sequences * 9, mean * tokens)


def test_a_batch_rejected_whole_moves_nothing():
    groups = near_groups()
    for denominator in Denominator:
        section = limited("default", reject_veto=1e6, denominator=denominator)
        gradient, outcome = step_of(groups, section)
        assert not gradient.any()
        assert outcome.losses == [0.0]
        values = checked(token_metrics(outcome, groups, 1, section))
        assert values["rejected/token_fraction"] == values["rejected/sequence_fraction"] == 1.0
        assert "kept/ess" not in values
        assert values["ess/raw"] > 0


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", ["grpo", "mean_only", "rloo", "opo", "maxrl", "batch_std"])
def test_b010_a_reward_that_is_no_number_is_named(reward, advantage):
    groups = random_groups(2, version=1)
    groups[1].rollouts[2].reward = reward
    policy = tiny_policy()
    before = {name: value.clone() for name, value in policy.module.state_dict().items()}
    with pytest.raises(NumericsError, match=r"from version 1: rewards of group 1/0 are not finite"):
        step_of(groups, AlgorithmSection(advantage=advantage), policy=policy)
    after = policy.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_rewards_of_1e8_are_rewards():
    groups = near_groups()
    plain, _ = step_of(groups, AlgorithmSection())
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = rollout.reward * 1e8 + 1e8
    large, _ = step_of(groups, AlgorithmSection())
    assert_scaled(large, plain)


def test_one_update_grpo_anchored_at_behavior_is_not_the_default():
    groups = near_groups(gap=0.6)
    grpo, _ = step_of(groups, limited("grpo", kl_coef=0.0, aggregation="token_mean"))
    default, outcome = step_of(groups, limited("default"))
    assert (grpo - default).abs().max() > 1e-3
    assert not outcome.tokens.clipped_high.any()  # inert: pi = pi_prox


def test_overlong_completions_lose_reward_or_are_not_trained():
    groups = near_groups()
    cut = groups[0].rollouts[1].sequences[0]
    cut.finish_reason = FinishReason.LENGTH
    section = limited("default", overlong_mask=True)
    _, outcome = step_of(groups, section)
    index = outcome.tokens.sequences.index
    assert torch.equal(outcome.tokens.rejected["overlong"], index == 1)
    section = limited("default", overlong_buffer_tokens=4, length_limit=8)
    _, punished = step_of(groups, section)
    lengths = [s.num_trained for s in punished.sequences[:4]]
    rewards = torch.tensor([r.reward for r in groups[0].rollouts], dtype=torch.float64)
    shaped = rewards - ((torch.tensor(lengths) - 4) / 4).clamp(0, 1)
    expected = (shaped - shaped.mean()) / (shaped.std(correction=0) + 1e-8)
    assert [s.advantage for s in punished.sequences[:4]] == pytest.approx(expected.tolist())


def test_m2_pools_the_batch_before_any_gradient():
    groups = near_groups()
    section = limited("m2po", reject_m2=0.03)
    _, whole = step_of(groups, section)
    _, split = step_of(groups, section, tokens_per_microbatch=1)
    assert torch.equal(whole.tokens.rejected["m2"], split.tokens.rejected["m2"])
    facts = whole.tokens
    log_w = facts.proximal_logprobs - facts.behavior_logprobs
    advantages = torch.tensor([s.advantage for s in whole.sequences], dtype=log_w.dtype)
    pool = log_w * facts.sequences.spread(advantages) > 0
    left = log_w[pool & ~facts.rejected["m2"]].square()
    assert 0 < len(left) < int(pool.sum())
    assert float(left.mean()) <= 0.03


def test_interpolated_proximal_needs_no_pass_and_tells_its_error():
    groups = near_groups()
    section = limited("a3po")
    _, outcome = step_of(groups, section, version=4, updates_per_step=3)
    facts = outcome.tokens
    versions = torch.tensor([v for s in outcome.sequences for v in s.versions[s.trained].tolist()])
    alpha = (3 - versions).double() / (4 - versions)
    expected = facts.behavior_logprobs + alpha * (facts.policy_logprobs - facts.behavior_logprobs)
    torch.testing.assert_close(facts.proximal_logprobs, expected)
    values = checked(token_metrics(outcome, groups, 4, section))
    first = slice(facts.num_first_update)
    error = (facts.proximal_logprobs - facts.policy_logprobs)[first].abs().mean()
    assert values["proximal/interpolation_error"] == pytest.approx(float(error))
    assert values["proximal/interpolation_error"] > 0.01


def test_the_lag0_gap_is_the_engines_also_when_the_proximal_policy_is_interpolated():
    groups = near_groups()
    for group in groups:
        for rollout in group.rollouts:
            completion = rollout.sequences[0]
            completion.segments = [completion.segments[-1].__class__(
                completion.segments[-1].weights, completion.num_tokens)]  # fmt: skip
    plain, interpolated = AlgorithmSection(), limited("a3po")
    found = [
        token_metrics(step_of(groups, section)[1], groups, 1, section)["logprob/lag0_gap"]
        for section in (plain, interpolated)
    ]
    assert found[0] == pytest.approx(found[1])
    assert found[0] > 0.1


def test_b021_raw_and_bounded_weights_are_told_apart():
    groups = near_groups(gap=1.5)
    section = limited("default")
    _, outcome = step_of(groups, section)
    values = checked(token_metrics(outcome, groups, 1, section))
    raw = (outcome.tokens.policy_logprobs - outcome.tokens.behavior_logprobs).exp()
    assert values["behavior_weight/raw_mean"] == pytest.approx(float(raw.mean()))
    assert values["behavior_weight/raw_max"] == pytest.approx(float(raw.max()))
    assert values["behavior_weight/mean"] == pytest.approx(float(raw.clamp(max=2).mean()))
    assert values["behavior_weight/raw_mean"] > values["behavior_weight/mean"] + 0.1
    assert values["ess/raw"] < values["ess/truncated"]


def test_statistics_before_and_after_masks_are_told_apart():
    groups = near_groups(gap=1.0)
    section = limited("icepop", behavior_weight_floor=0.8, behavior_weight_cap=1.3)
    _, outcome = step_of(groups, section)
    values = checked(token_metrics(outcome, groups, 1, section))
    facts = outcome.tokens
    w = (facts.proximal_logprobs - facts.behavior_logprobs).exp()
    kept = (w >= 0.8) & (w <= 1.3)
    assert values["rejected/behavior_weight_fraction"] == pytest.approx(
        1 - float(kept.double().mean())
    )
    assert values["kept/ratio_mean"] == pytest.approx(float(w[kept].mean()))
    assert values["ratio/behavior_mean"] == pytest.approx(float(w.mean()))
    assert values["kept/k3"] < values["kl/behavior_k3"]


@pytest.mark.parametrize("preset", Preset)
def test_every_objective_has_declared_finite_metrics(preset):
    groups = near_groups()
    section = limited(preset)
    _, outcome = step_of(groups, section)
    values = token_metrics(outcome, groups, 1, section)
    # a batch may be rejected whole; then no weight has an effective size
    unknown = {name for name, value in values.items() if not math.isfinite(value)}
    assert unknown <= {"ess/truncated", "ess/sequence_truncated"}
    checked(values)


def my_surrogate(given: SurrogateInput):
    return -given.ratio * given.advantages


def my_advantage(rewards, lengths):
    return [group - group.median() for group in rewards]


def short_advantage(rewards, lengths):
    return [group[:-1] for group in rewards]


def my_mask(batch):
    return batch.advantages < batch.advantages.median()  # of the whole batch


NOT_A_FUNCTION = 3


def test_an_entropy_bonus_pulls_towards_its_own_gradient_and_on_tied_groups_too():
    groups = near_groups()
    for rollout in groups[0].rollouts:
        rollout.reward = 1.0
    plain, outcome = step_of(groups, limited("default"))
    bonus = assert_invariant(groups, limited("default", entropy_coef=0.1))
    found, _ = step_of(groups, limited("default", entropy_coef=0.1))
    mean_entropy = float(outcome.tokens.entropy.mean())
    assert bonus.losses[0] == pytest.approx(outcome.losses[0] - 0.1 * mean_entropy, abs=1e-9)
    twice, _ = step_of(groups, limited("default", entropy_coef=0.2))
    assert (found - plain).abs().max() > 1e-6
    assert_scaled(twice - plain, 2 * (found - plain))
    policy = tiny_policy()
    for _ in range(5):
        _, later = step_of(groups, limited("default", entropy_coef=10.0), policy=policy)
    assert float(later.tokens.entropy.mean()) > mean_entropy + 0.01
    everything = limited("default", entropy_coef=0.1, reject_veto=1e6)
    gradient, _ = step_of(groups, everything)
    assert not gradient.any()  # rejected tokens have no bonus


def test_parts_of_ones_own():
    groups = near_groups()
    section = limited(
        "grpo", kl_coef=0.0, surrogate=f"{HERE}:my_surrogate",
        advantage=f"{HERE}:my_advantage", reject_custom=[f"{HERE}:my_mask"],
    )  # fmt: skip
    outcome = assert_invariant(groups, section)
    rewards = torch.tensor([r.reward for r in groups[0].rollouts], dtype=torch.float64)
    found = [s.advantage for s in outcome.sequences[:4]]
    assert found == (rewards - rewards.median()).tolist()
    assert 0 < float(outcome.tokens.rejected["custom"].double().mean()) < 1
    values = checked(token_metrics(outcome, groups, 1, section))
    assert values["rejected/custom_fraction"] == values["rejected/token_fraction"]


def test_parts_of_ones_own_that_do_not_fit_are_refused():
    groups = random_groups(1, version=1)
    with pytest.raises(ConfigError, match=r"algorithm\.surrogate.*not a function"):
        step_of(groups, AlgorithmSection(surrogate=f"{HERE}:NOT_A_FUNCTION"))
    with pytest.raises(ConfigError, match=r"algorithm\.advantage.*no attribute"):
        step_of(groups, AlgorithmSection(advantage=f"{HERE}:missing"))
    with pytest.raises(ValueError, match="one per rollout"):
        step_of(groups, AlgorithmSection(advantage=f"{HERE}:short_advantage"))
