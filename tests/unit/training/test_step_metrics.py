import math

import numpy as np
import pytest
import torch

from async_grpo.config.algorithm import AlgorithmSection
from async_grpo.config.trainer import TrainerSection
from async_grpo.metrics.registry import METRICS, checked
from async_grpo.replay_parts import GeneratedStats
from async_grpo.training.off_policy_metrics import by_staleness, engine_mismatch
from async_grpo.training.step import TrainStep
from async_grpo.training.step_metrics import ess_by_lag, group_metrics, token_metrics
from async_grpo.types import DropReason, Segment, WeightsName
from tests.fakes.tiny_policy import random_groups, tiny_policy


def test_reward_mean_is_over_all_that_finished():
    groups = random_groups(2, 2)
    for reward, rollout in zip(
        (1.0, 0.0, 1.0, 1.0), [r for g in groups for r in g.rollouts], strict=True
    ):
        rollout.reward = reward
    generated = GeneratedStats(
        num_groups=5,
        num_completions=10,
        num_tokens=80,
        reward_sum=3.0,
        dropped={DropReason.NO_SIGNAL: 2},
        dropped_tokens={DropReason.NO_SIGNAL: 20},
    )
    values = checked(group_metrics(groups, generated, [1.0, 3.0]))
    assert values["reward/mean"] == 0.3
    assert values["reward/trained_mean"] == 0.75
    assert values["reward/group_std"] == 0.25
    assert values["zero_variance_fraction"] == 3 / 4
    assert values["completion/generated_length_mean"] == 8.0
    assert values["staleness/in_queue_s"] == 2.0
    assert values["dropped/no_signal_groups"] == 2
    assert values["dropped/no_signal_tokens"] == 20
    assert values["dropped/stale_groups"] == 0
    nothing = group_metrics(groups, GeneratedStats(), [0.0, 0.0])
    assert nothing["reward/mean"] == 0.75


@pytest.fixture
def stepped():
    """One group of 3 completions of 4 tokens: version 5, version 3, and 3 then 4."""
    (group,) = random_groups(1, 3, max_tokens=9)
    segments = [
        [Segment(WeightsName(1, 5), 4)],
        [Segment(WeightsName(1, 3), 4)],
        [Segment(WeightsName(1, 3), 1), Segment(WeightsName(1, 4), 3, kv_mixed=True)],
    ]
    for rollout, parts in zip(group.rollouts, segments, strict=True):
        sequence = rollout.sequences[0]
        sequence.token_ids = np.arange(4, dtype=np.int32)
        sequence.behavior_logprobs = np.full(4, -2.0, dtype=np.float32)
        sequence.segments = parts
        sequence.temperature = 1.0
    policy = tiny_policy()
    algorithm = AlgorithmSection()
    step = TrainStep(policy, algorithm, TrainerSection(), num_train_steps=10)
    outcome = step.apply([group], 5)
    return outcome, checked(token_metrics(outcome, [group], 5, algorithm))


def test_staleness_is_counted_by_token_and_split(stepped):
    _, values = stepped
    lags = [0] * 4 + [2] * 4 + [2] + [1] * 3
    assert values["staleness/mean"] == pytest.approx(sum(lags) / 12)
    assert values["staleness/max"] == 2
    assert values["staleness/in_queue"] == 0.0  # its newest token is of the version trained from
    assert values["staleness/in_flight"] == pytest.approx(sum(lags) / 12)
    assert values["staleness/in_flight_s"] == 0.25
    assert values["by_staleness/0/tokens"] == 4
    assert values["by_staleness/1/tokens"] == 3
    assert values["by_staleness/2/tokens"] == 5
    assert "by_staleness/3-4/tokens" not in values


def test_ratios_and_weights_are_those_of_the_log_probs(stepped):
    outcome, values = stepped
    w = (outcome.tokens.policy_logprobs + 2.0).exp()
    capped = w.clamp(max=2.0)
    assert values["ratio/behavior_mean"] == pytest.approx(float(w.mean()))
    assert values["ratio/proximal_max"] == 1.0
    assert values["behavior_weight/mean"] == pytest.approx(float(capped.mean()))
    assert values["behavior_weight/truncated_fraction"] == float((w > 2).double().mean())
    assert values["ess/raw"] == pytest.approx(float(w.sum() ** 2 / (12 * (w**2).sum())))
    assert values["ess/truncated"] == pytest.approx(
        float(capped.sum() ** 2 / (12 * (capped**2).sum()))
    )
    outside = (w < 0.8) | (w > 1.28)
    assert values["clip/behavior_fraction"] == pytest.approx(float(outside.double().mean()))
    assert values["clip/low_fraction"] == 0.0


def test_the_lag0_gap_is_over_whole_fresh_completions_only(stepped):
    outcome, values = stepped
    fresh = outcome.tokens.policy_logprobs[:4]  # the first completion alone
    assert values["logprob/lag0_gap"] == pytest.approx(float((fresh + 2.0).abs().mean()))


def test_the_rest_is_there_and_finite(stepped):
    outcome, values = stepped
    assert values["tokens/trained"] == 12
    assert values["masked_fraction"] == 0.0
    assert 0 < values["entropy"] <= math.log(19)
    assert values["loss"] == outcome.losses[0]
    assert values["grad_norm"] == outcome.grad_norms[0] > 0
    assert torch.isfinite(torch.tensor(list(values.values()))).all()


def test_every_off_policy_statistic_is_there_by_staleness(stepped):
    """Of the tokens of a bucket, and of the sequences whose oldest token is in it."""
    outcome, values = stepped
    declared = [name for name, metric in METRICS.items() if metric.by_staleness]
    of_batch = [name for name in declared if name in values]
    assert {"ess/raw", "ess/sequence_truncated", "clip/behavior_fraction", "m2"} <= set(of_batch)
    w = (outcome.tokens.policy_logprobs + 2.0).exp().double()
    lags = torch.tensor([0] * 4 + [2] * 4 + [2] + [1] * 3)
    for bucket, lag in (("0", 0), ("1", 1), ("2", 2)):
        there = {name for name in of_batch if f"by_staleness/{bucket}/{name}" in values}
        whole = {name for name in of_batch if "sequence" in name or "perplexity" in name}
        # the one sequence with tokens of staleness 1 has an older one: it is under 2
        assert there == set(of_batch) - (whole if lag == 1 else set())
        own = w[lags == lag]
        under = f"by_staleness/{bucket}"
        assert values[f"{under}/ratio/behavior_max"] == pytest.approx(float(own.max()))
        assert values[f"{under}/ess/raw"] == pytest.approx(
            float(own.sum() ** 2 / (len(own) * (own**2).sum()))
        )
        assert values[f"{under}/behavior_weight/mean"] == pytest.approx(
            float(own.clamp(max=2).mean())
        )
        assert values[f"{under}/kl/behavior_k3"] == pytest.approx(
            float((own - own.log() - 1).mean())
        )
    products = torch.stack([w[4:8].prod(), w[8:].prod()])
    assert values["by_staleness/2/ess/sequence_raw"] == pytest.approx(
        float(products.sum() ** 2 / (2 * (products**2).sum()))
    )
    assert values["by_staleness/0/ess/sequence_raw"] == pytest.approx(1.0)  # of one sequence


def test_masks_are_told_apart_by_staleness_too(stepped):
    outcome, _ = stepped
    facts = outcome.tokens
    facts.kept = facts.proximal_logprobs < facts.proximal_logprobs.median()
    facts.rejected = {"token_bounds": ~facts.kept}
    staleness = torch.tensor([0] * 4 + [2] * 4 + [2] + [1] * 3)
    values = checked(by_staleness(facts, staleness, AlgorithmSection()))
    own = facts.kept[staleness == 2].double()
    assert values["by_staleness/2/rejected/token_fraction"] == pytest.approx(1 - float(own.mean()))
    assert values["by_staleness/2/rejected/token_bounds_fraction"] == pytest.approx(
        1 - float(own.mean())
    )
    left = facts.kept & (staleness == 2)
    if left.any():
        w = (facts.proximal_logprobs + 2.0).exp()[left]
        assert values["by_staleness/2/kept/ratio_mean"] == pytest.approx(float(w.mean()))


def test_engine_mismatch_of_known_gaps():
    behavior = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    values = checked(engine_mismatch(behavior, behavior + torch.tensor([0.0, 0.1, -0.3])))
    assert values["logprob/lag0_tokens"] == 3
    assert values["logprob/lag0_gap"] == pytest.approx(0.4 / 3)
    assert values["logprob/lag0_gap_max"] == pytest.approx(0.3)
    assert values["logprob/lag0_k1"] == pytest.approx(0.2 / 3)
    w = np.exp([0.0, 0.1, -0.3])
    assert values["logprob/lag0_k3"] == pytest.approx(float(np.mean(w - np.log(w) - 1)))
    assert values["logprob/lag0_ess"] == pytest.approx(w.sum() ** 2 / (3 * (w**2).sum()))


def test_ess_by_lag_is_of_raw_weights(stepped):
    outcome, values = stepped
    found = ess_by_lag(outcome, 5, AlgorithmSection())
    assert {lag: count for lag, (count, _) in found.items()} == {0: 4, 1: 3, 2: 5}
    for lag, (_, ess) in found.items():
        assert ess == pytest.approx(values[f"by_staleness/{lag}/ess/raw"])
