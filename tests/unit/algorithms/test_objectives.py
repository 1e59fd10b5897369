"""Composed objectives: limits, extremes, missing inputs, and expectations by enumeration."""

import itertools
import math

import pytest
import torch

from async_grpo.algorithms import kl, surrogates
from async_grpo.algorithms.behavior_weights import BehaviorWeightRule, WeightAction
from async_grpo.algorithms.importance import RatioLevel
from async_grpo.algorithms.losses import Objective, TokenBatch, policy_loss, rejections
from async_grpo.algorithms.sequences import Sequences
from async_grpo.config.algorithm import preset_section
from async_grpo.config.presets import Preset
from async_grpo.training.objective import make_objective

LENGTHS = [3, 2, 4, 1]


def batch(*, policy, behavior, advantages, proximal=None, reference=None, lengths=LENGTHS):
    names = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return TokenBatch(
        policy_logprobs=policy,
        proximal_logprobs=policy.detach() if proximal is None else proximal,
        behavior_logprobs=behavior,
        advantages=advantages,
        sequences=Sequences.of(names),
        reference_logprobs=policy.detach() if reference is None else reference,
        truncated=torch.zeros(len(policy), dtype=torch.bool),
    )


def random_batch(seed=0, spread=0.3, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    behavior = -0.1 - 2 * torch.rand(count, generator=rng, dtype=dtype)
    policy = behavior + spread * torch.randn(count, generator=rng, dtype=dtype)
    signs = torch.tensor([1.5, -0.9, 0.3, -0.9], dtype=dtype)
    advantages = signs.repeat_interleave(torch.tensor(LENGTHS))
    return batch(policy=policy.requires_grad_(), behavior=behavior, advantages=advantages)


def per_sequence_mean(values):
    lengths = torch.tensor(LENGTHS).repeat_interleave(torch.tensor(LENGTHS))
    return (values / lengths).sum()


@pytest.mark.parametrize("preset", Preset)
def test_on_policy_every_objective_is_reinforce(preset):
    """pi = pi_prox = pi_behavior: the gradient of each token is -A, for every preset."""
    given = random_batch(spread=0.0)
    result = policy_loss(given, make_objective(preset_section(preset, **without_kl(preset))))
    (gradient,) = torch.autograd.grad(per_sequence_mean(result.per_token), given.policy_logprobs)
    (expected,) = torch.autograd.grad(
        per_sequence_mean(-given.advantages * given.policy_logprobs), given.policy_logprobs
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def without_kl(preset):
    return {"kl_coef": 0.0} if preset is Preset.grpo else {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("preset", Preset)
def test_b014_log_ratios_of_200_give_finite_losses_and_gradients(preset, dtype):
    for shift, sign in itertools.product((-200.0, 200.0), (-1.0, 0.0, 1.0)):
        behavior = torch.full((10,), -201.0, dtype=dtype)
        policy = (behavior + shift).requires_grad_()
        given = batch(
            policy=policy, behavior=behavior, advantages=torch.full((10,), sign, dtype=dtype),
            proximal=behavior - shift, reference=behavior,
        )  # fmt: skip
        section = preset_section(preset, kl_coef=0.1, kl_estimator="k3", kl_correction="through")
        result = policy_loss(given, make_objective(section))
        (gradient,) = torch.autograd.grad(result.per_token.sum(), policy)
        assert result.per_token.isfinite().all()
        assert gradient.isfinite().all()
        assert result.per_token.dtype is dtype


@pytest.mark.parametrize("preset", Preset)
@pytest.mark.parametrize("broken", ["policy_logprobs", "behavior_logprobs"])
def test_a_log_prob_that_is_no_number_surfaces_in_the_loss(preset, broken):
    """A mask must not hide it."""
    given = random_batch()
    values = getattr(given, broken).detach().clone()
    values[4] = math.nan
    other = given.behavior_logprobs if broken == "policy_logprobs" else given.policy_logprobs
    tensors = {"policy": other.detach(), "behavior": other.detach()}
    tensors["policy" if broken == "policy_logprobs" else "behavior"] = values
    result = policy_loss(
        batch(advantages=given.advantages, **tensors), make_objective(preset_section(preset))
    )
    in_the_loss = preset not in (Preset.gpg, Preset.rloo, Preset.opo, Preset.uncorrected)
    if broken == "behavior_logprobs" and preset is Preset.geo_rs:
        in_the_loss = False  # it only decides whether a sequence is rejected: it must not be
        assert result.kept[3:5].all()
    if broken == "policy_logprobs" or in_the_loss:
        assert not result.per_token.sum().isfinite()


@pytest.mark.parametrize("preset", Preset)
def test_an_empty_batch_has_no_loss(preset):
    empty = torch.zeros(0, dtype=torch.float64)
    given = batch(policy=empty.clone().requires_grad_(), behavior=empty, advantages=empty,
                  lengths=[])  # fmt: skip
    assert policy_loss(given, make_objective(preset_section(preset))).per_token.numel() == 0


def test_a_correction_without_its_input_fails_loudly():
    given = random_batch()

    def without(**missing):
        fields = {name: getattr(given, name) for name in TokenBatch.__slots__}
        return TokenBatch(**(fields | missing))

    needs_behavior = [
        Objective(weight=BehaviorWeightRule(WeightAction.truncate, cap=2.0)),
        make_objective(preset_section("grpo")),
        make_objective(preset_section("geo_rs")),
        make_objective(preset_section("uncorrected", reject_veto=1e-4)),
        make_objective(preset_section("uncorrected", reject_opsm=0.1)),
        make_objective(preset_section("uncorrected", reject_m2=0.1)),
        Objective(kl=kl.KLRule(0.1, correction=kl.KLCorrection.through)),
    ]
    for objective in needs_behavior:
        with pytest.raises(ValueError, match="behavior"):
            policy_loss(without(behavior_logprobs=None), objective)
    with pytest.raises(ValueError, match="reference_logprobs"):
        policy_loss(without(reference_logprobs=None), Objective(kl=kl.KLRule(0.1)))
    with pytest.raises(ValueError, match="entropy"):
        policy_loss(without(entropy=None), Objective(entropy_coef=0.1))
    with pytest.raises(ValueError, match="truncated"):
        policy_loss(
            without(truncated=None),
            make_objective(preset_section("default", overlong_mask=True)),
        )
    with pytest.raises(ValueError, match="one shape"):
        policy_loss(without(advantages=given.advantages[:-1]), Objective())


@pytest.mark.parametrize("preset", Preset)
def test_what_is_rejected_has_no_loss_no_kl_and_no_gradient(preset):
    given = random_batch(spread=1.5)
    section = preset_section(preset, kl_coef=0.1, kl_estimator="k3")
    objective = make_objective(section)
    result = policy_loss(given, objective)
    found = rejections(given, objective)
    again = policy_loss(given, objective, found)
    assert torch.equal(result.per_token, again.per_token)
    assert found.keys() == result.rejected.keys()
    (gradient,) = torch.autograd.grad(result.per_token.sum(), given.policy_logprobs)
    lost = ~result.kept
    assert not result.per_token[lost].any()
    if section.ratio_level == "token":
        assert not gradient[lost].any()
    rejecting = {Preset.decoupled_ppo, Preset.icepop, Preset.mis, Preset.geo_rs, Preset.prime_rl,
                 Preset.m2po, Preset.opsm}  # fmt: skip
    assert bool(found) == (preset in rejecting)


def test_b016_a_long_sequence_of_small_gaps_keeps_its_weight():
    """10,000 tokens 3e-4 apart: the geometric weight is 1, the product 0.05, both told apart."""
    count = 10_000
    behavior = torch.full((count,), -1.0)
    given = batch(policy=behavior - 3e-4, behavior=behavior, advantages=torch.ones(count),
                  lengths=[count])  # fmt: skip
    for level, expected in ((RatioLevel.geometric, 1.0), (RatioLevel.sequence, math.exp(-3))):
        rule = BehaviorWeightRule(WeightAction.truncate, level, floor=0.5, cap=2.0)
        weight = policy_loss(given, Objective(weight=rule)).weight
        assert float(weight.raw[0]) == pytest.approx(expected, rel=1e-2)
        assert float(weight.applied[0]) == pytest.approx(max(expected, 0.5), rel=1e-2)


def test_b042_the_clip_is_around_the_proximal_policy_and_the_weight_is_not():
    """Two epochs over one batch: three policies, and r and w are of different pairs."""
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    given = batch(policy=policy, behavior=torch.tensor([-1.5], dtype=torch.float64),
                  advantages=torch.tensor([-1.0], dtype=torch.float64),
                  proximal=torch.tensor([-1.1], dtype=torch.float64), lengths=[1])  # fmt: skip
    result = policy_loss(given, make_objective(preset_section("default")))
    assert float(result.importance_ratio) == pytest.approx(math.exp(0.1))
    assert float(result.weight.raw) == pytest.approx(math.exp(0.4))
    assert float(result.per_token.detach()) == pytest.approx(math.exp(0.5))


# Expectations over all sequences of two tokens of three values: nothing is sampled.

FIRST = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)
SECOND = torch.tensor([[0.1, 0.7, -0.4], [0.0, -0.6, 0.2], [0.5, 0.1, 0.3]], dtype=torch.float64)
BEHAVIOR_FIRST = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
BEHAVIOR_SECOND = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2], [0.25, 0.25, 0.5]],
                               dtype=torch.float64)  # fmt: skip
REWARD = torch.tensor([[1.0, 0.2, 0.0], [0.0, 0.7, 0.1], [0.4, 0.0, 1.3]], dtype=torch.float64)


def enumerated_gradient(objective):
    """Exact expected gradient (to maximize) over behavior's sequences, with a baseline of 0.3."""
    first, second = FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()
    log_first, log_second = first.log_softmax(-1), second.log_softmax(-1)
    places = list(itertools.product(range(3), range(3)))
    policy = torch.stack([x for a, b in places for x in (log_first[a], log_second[a, b])])
    behavior = torch.stack(
        [x for a, b in places for x in (BEHAVIOR_FIRST[a].log(), BEHAVIOR_SECOND[a, b].log())]
    )
    probability = torch.stack([BEHAVIOR_FIRST[a] * BEHAVIOR_SECOND[a, b] for a, b in places])
    advantages = torch.stack([REWARD[a, b] - 0.3 for a, b in places])
    given = batch(policy=policy, behavior=behavior, advantages=advantages.repeat_interleave(2),
                  lengths=[2] * 9)  # fmt: skip
    per_token = policy_loss(given, objective).per_token
    expected = -(probability.repeat_interleave(2) * per_token).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(expected, (first, second))])


def true_gradient():
    first, second = FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()
    value = (first.softmax(-1)[:, None] * second.softmax(-1) * REWARD).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, (first, second))])


def whole(action=WeightAction.truncate, **bounds):
    return Objective(
        surrogate=surrogates.reinforce,
        weight=BehaviorWeightRule(action, RatioLevel.sequence, **bounds),
    )


def test_only_whole_sequence_weights_are_unbiased_for_sequences():
    exact = true_gradient()
    torch.testing.assert_close(enumerated_gradient(whole()), exact, rtol=1e-12, atol=1e-12)
    others = {
        "token": Objective(
            surrogate=surrogates.reinforce, weight=BehaviorWeightRule(WeightAction.truncate)
        ),
        "geometric": Objective(
            surrogate=surrogates.reinforce,
            weight=BehaviorWeightRule(WeightAction.truncate, RatioLevel.geometric),
        ),
        "truncated": whole(cap=1.2),
        "masked": whole(WeightAction.mask, floor=0.5, cap=1.5),
        "uncorrected": Objective(surrogate=surrogates.reinforce),
    }
    for name, objective in others.items():
        assert (enumerated_gradient(objective) - exact).abs().max() > 1e-3, name


def test_the_bias_of_truncation_is_the_mass_above_the_cap():
    """Exactly: true - truncated = E_mu[(w - cap)+ * A * score]."""
    cap = 1.2
    first, second = FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()
    log_first, log_second = first.log_softmax(-1), second.log_softmax(-1)
    missing = torch.zeros((), dtype=torch.float64)
    for a, b in itertools.product(range(3), range(3)):
        mu = BEHAVIOR_FIRST[a] * BEHAVIOR_SECOND[a, b]
        score = log_first[a] + log_second[a, b]
        above = (score.detach().exp() / mu - cap).clamp(min=0)
        missing = missing + mu * above * (REWARD[a, b] - 0.3) * score
    bias = torch.cat([g.flatten() for g in torch.autograd.grad(missing, (first, second))])
    found = true_gradient() - enumerated_gradient(whole(cap=cap))
    torch.testing.assert_close(found, bias, rtol=1e-10, atol=1e-12)


def test_differences_weighed_by_the_reference_probability_are_no_kl():
    """`ref(a) * (log pi(a) - log ref(a))` on chosen tokens is negative where the KL is not."""
    pi = torch.tensor([0.5, 0.5], dtype=torch.float64)
    reference = torch.tensor([0.9, 0.1], dtype=torch.float64)
    x = kl.k1(pi.log(), reference.log())
    weighed = float((pi * reference * x).sum())
    true = float((pi * x).sum())
    assert true == pytest.approx(0.5108256237659907)
    assert weighed == pytest.approx(-0.18403, abs=1e-5)
    # nor is it a KL of anything else: it has no minimum at pi = reference
    logits = reference.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    value = (logprobs.exp() * reference * kl.k1(logprobs, reference.log())).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.abs().max() > 0.05
    # while every estimate we have says 0, and stays, there
    for estimator in (kl.k1, kl.k2, kl.k3):
        assert not estimator(reference.log(), reference.log()).any()
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * kl.k1(logprobs, reference.log())).sum()
    (still,) = torch.autograd.grad(exact, logits)
    assert still.abs().max() < 1e-15


def test_detached_k2_and_through_k3_have_the_same_gradient():
    given = random_batch(spread=0.8)
    reference = given.behavior_logprobs - 0.2
    found = []
    for estimator, correction in (("k2", "detached"), ("k3", "through")):
        rule = kl.KLRule(1.0, kl.KLEstimator(estimator), kl.KLCorrection(correction))
        value = kl.kl_penalty(given.policy_logprobs, reference, given.behavior_logprobs, rule)
        found += torch.autograd.grad(value.sum(), given.policy_logprobs)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
