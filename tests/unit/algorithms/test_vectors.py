"""Every number of tests/vectors that the default objective covers, gradients included."""

import json
from pathlib import Path

import pytest
import torch

from async_grpo.algorithms.advantages import AdvantageScale, group_advantages
from async_grpo.algorithms.aggregation import Aggregation, denominator, sequence_token_weights
from async_grpo.algorithms.diagnostics import (
    divergence,
    effective_sample_size,
    ratio_statistics,
)
from async_grpo.algorithms.importance import truncated_behavior_weight
from async_grpo.algorithms.kl import k1, k2, k3
from async_grpo.algorithms.losses import policy_loss, ppo_surrogate
from async_grpo.algorithms.staleness import split
from async_grpo.training.logprobs import chosen_logprobs

FILE = Path(__file__).parents[2] / "vectors" / "vectors.json"
VECTORS = {vector["name"]: vector for vector in json.loads(FILE.read_text())["vectors"]}
AGGREGATIONS = {
    "token-mean": Aggregation.token_mean,
    "seq-mean-token-mean": Aggregation.sequence_mean_token_mean,
}


def close(actual, expected, tolerance=1e-9):
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def tensors(vector):
    return {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in vector["inputs"].items()
        if isinstance(value, list)
    }


def advantages(rewards, eps, scale=AdvantageScale.grpo):
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), scale=scale, eps=eps)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("adv_grpo_popstd_eps_outside", "adv"),
        ("adv_grpo_tiny_variance_two_forms", "outside"),
        ("adv_grpo_zero_variance_all_zero", "outside"),
        ("adv_grpo_zero_variance_all_one", "outside"),
        ("adv_grpo_binary_1_of_8", "adv"),
        ("adv_group_member_rejected_policy", None),
        ("adv_dr_grpo", "adv"),
    ],
)
def test_advantages(name, key):
    vector = VECTORS[name]
    scale = AdvantageScale.mean_only if name == "adv_dr_grpo" else AdvantageScale.grpo
    found = advantages(vector["inputs"]["rewards"], vector["config"].get("eps", 0.0), scale)
    if key is None:  # our policy: statistics over all finished members, the rejected one gets 0
        keep = torch.tensor(vector["inputs"]["keep"], dtype=torch.float64)
        close(found * keep, vector["expected"]["stats_before_reject"])
    else:
        close(found, vector["expected"][key])


def test_tied_groups_are_exactly_zero():
    rewards = VECTORS["dapo_dynamic_sampling_keep"]["inputs"]["rewards"]
    found = advantages(rewards, 1e-8)
    keep = VECTORS["dapo_dynamic_sampling_keep"]["expected"]["keep"]
    assert [bool(row.any()) for row in found] == keep
    assert advantages([0.1] * 7, 0.0).tolist() == [0.0] * 7
    assert advantages([3.0], 0.0).tolist() == [0.0]


LOSSES = {
    # name: (anchor, behavior weight)
    "loss_grpo_clip02_behav_anchor": ("behav", False),
    "loss_grpo_clip02_k3_beta004": ("prox", False),
    "loss_dapo_token_mean_cliphigher": ("prox", False),
    "loss_dual_clip_c3": ("old", False),
    "loss_decoupled_ppo_tis_token": ("prox", True),
    "loss_decoupled_single_step_prox_is_theta": ("logp", True),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients(name):
    vector = VECTORS[name]
    config, given = vector["config"], tensors(vector)
    anchor, weighted = LOSSES[name]
    policy = given["logp"].requires_grad_()
    proximal = given[anchor].detach()
    mask = given["mask"]
    result = policy_loss(
        policy,
        proximal,
        given["behav"] if weighted else proximal,
        given["adv"],
        given.get("ref"),
        clip_low=config["eps_low"],
        clip_high=config["eps_high"],
        dual_clip=config.get("c"),
        behavior_weight_cap=config["cap"] if weighted else None,
        kl_coef=config.get("beta", 0.0),
    )
    counts = [int(count) for count in mask.sum(-1).tolist()]
    rule = AGGREGATIONS[config["agg"]]
    weights = torch.tensor(sequence_token_weights(rule, counts), dtype=torch.float64)[:, None]
    loss = (result.per_token * mask * weights).sum() / denominator(rule, counts)
    loss.backward()
    close(loss.detach(), vector["expected"]["loss"])
    close(result.per_token.detach() * mask, vector["expected"]["per_token"])
    close(policy.grad, vector["expected"]["grad_logp"], 1e-8)
    if "clip_frac" in vector["expected"]:
        clipped = result.surrogate.clipped_low | result.surrogate.clipped_high
        close(clipped[mask.bool()].double().mean(), vector["expected"]["clip_frac"])


def test_raw_decoupled_weight_is_the_cap_taken_away():
    vector = VECTORS["loss_decoupled_ppo_raw"]
    given, config = tensors(vector), vector["config"]
    policy = given["logp"].requires_grad_()
    result = policy_loss(
        policy, given["prox"], given["behav"], given["adv"],
        clip_low=config["eps_low"], clip_high=config["eps_high"], dual_clip=None,
        behavior_weight_cap=float("inf"),
    )  # fmt: skip
    loss = (result.per_token * given["mask"]).sum() / given["mask"].sum()
    loss.backward()
    close(loss.detach(), vector["expected"]["loss"])
    close(policy.grad, vector["expected"]["grad_logp"], 1e-8)


def test_dual_clip_matters():
    vector = VECTORS["loss_dual_clip_c3"]
    given = tensors(vector)
    ratio = (given["logp"] - given["old"]).exp()
    plain = ppo_surrogate(ratio, given["adv"], clip_low=0.2, clip_high=0.2)
    without = (plain.losses * given["mask"]).sum() / given["mask"].sum()
    close(without, vector["expected"]["loss_without_dual"])
    dual = ppo_surrogate(ratio, given["adv"], clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert int(dual.clipped_dual.sum()) == 1


def test_kl_values_and_derivatives():
    vector = VECTORS["kl_values_per_token"]
    given = tensors(vector)
    for name, estimator in (("k1", k1), ("k2", k2), ("k3", k3)):
        policy = given["logp"].clone().requires_grad_()
        value = estimator(policy, given["ref"]) * given["mask"]
        value.sum().backward()
        close(value.detach(), vector["expected"][name])
        close(policy.grad * given["mask"], vector["expected"][f"d{name[:1]}{name[1:]}"], 1e-8)


def test_kl_expected_gradients():
    vector = VECTORS["kl_expected_gradients_3way_categorical"]
    given = tensors(vector)
    expected = vector["expected"]
    reference = given["ref"].log() if bool((given["ref"] > 0).all()) else given["ref"]
    for name, estimator in (("k1", k1), ("k2", k2), ("k3", k3)):
        logits = given["logits"].clone().requires_grad_()
        logprobs = logits.log_softmax(-1)
        (logprobs.exp().detach() * estimator(logprobs, reference)).sum().backward()
        close(logits.grad, expected[f"onpolicy_E_grad_{name}_loss"], 1e-8)


def test_diagnostics():
    vector = VECTORS["diagnostics_rollout_vs_prox"]
    given, expected = tensors(vector), vector["expected"]
    mask = given["mask"].bool()
    behavior, proximal = given["behav"][mask], given["prox"][mask]
    gap = divergence(behavior, proximal)
    close(gap["k1"], expected["k1_behav_prox"])
    close(gap["k3"], expected["k3"])
    close(gap["chi2"], expected["chi2_token"])
    close(gap["m2"], expected["m2"])
    close(gap["ess"], expected["ess_token_frac"])
    ratios = ratio_statistics(proximal, behavior)
    for name in ("mean", "max", "min"):
        close(ratios[name], expected[f"{name}_ratio"])


def test_effective_sample_size_identity():
    vector = VECTORS["ess_identity"]
    weights = torch.tensor(vector["inputs"]["w"], dtype=torch.float64)
    close(effective_sample_size(weights), vector["expected"]["ess_frac"])
    cv = weights.std(correction=0) / weights.mean()
    close(1 / (1 + cv.square()), vector["expected"]["one_over_1_plus_cv2"])


def test_truncated_weights_have_the_bias_of_the_bandit():
    vector = VECTORS["pg_exact_bandit"]
    given, expected = tensors(vector), vector["expected"]
    for cap, key in ((float("inf"), "is_exact"), (vector["config"]["tis_cap"], "tis")):
        logits = given["logits"].clone().requires_grad_()
        logprobs = logits.log_softmax(-1)
        behavior = given["behaviour"].log()
        weight = truncated_behavior_weight(logprobs.detach(), behavior, cap=cap)
        value = given["reward"] - vector["inputs"]["baseline"]
        (given["behaviour"] * weight * value * logprobs).sum().backward()
        close(logits.grad, expected[key], 1e-8)


def test_staleness_of_tokens():
    vector = VECTORS["lag_histogram_per_token_versions"]
    versions, expected = vector["inputs"]["versions"], vector["expected"]
    found = split(vector["config"]["trainer_version"], versions)
    close(found.mean, expected["mean"])
    assert found.max == expected["max"]
    close(found.in_flight + found.in_queue, found.mean)
    assert found.num_tokens == 10


def test_entropy_and_temperature_of_the_head():
    vector = VECTORS["entropy_and_gradient"]
    identity = torch.eye(3, dtype=torch.float64)
    logits = torch.tensor(vector["inputs"]["logits"], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    _, entropy = chosen_logprobs(
        logits[None], identity, torch.zeros(1, dtype=torch.int64), one, chunk_tokens=4
    )
    close(entropy[0], vector["expected"]["entropy"])
    vector = VECTORS["sampling_logprob_variants"]
    logits = torch.tensor(vector["inputs"]["logits"], dtype=torch.float64)
    count = len(logits)
    logprobs, _ = chosen_logprobs(
        logits.expand(count, -1),
        torch.eye(count, dtype=torch.float64),
        torch.arange(count),
        torch.full((count,), vector["config"]["temperature"], dtype=torch.float64),
        chunk_tokens=3,
    )
    close(logprobs, vector["expected"]["temperature_scaled"])


def test_a_wrong_expected_number_would_be_noticed():
    with pytest.raises(AssertionError):
        close(1.0, 1.0 + 1e-6)
