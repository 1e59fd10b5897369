"""Faults that users of other engines met, tried on the whole train step; see docs/faults.md."""

import copy

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from async_grpo.algorithms.aggregation import Aggregation as Rule
from async_grpo.algorithms.aggregation import denominator
from async_grpo.config.alarms import AlarmsSection
from async_grpo.config.algorithm import Aggregation, AlgorithmSection, Proximal
from async_grpo.config.trainer import TrainerSection
from async_grpo.replay_parts import GeneratedStats
from async_grpo.training.alarms import Alarms
from async_grpo.training.batching import make_microbatches, sequences_of
from async_grpo.training.model import LogprobRequest, PolicyModel
from async_grpo.training.step import TrainStep
from async_grpo.training.step_metrics import group_metrics, token_metrics
from async_grpo.types import Completion, FinishReason, Rollout, RolloutGroup, Segment, WeightsName
from tests.fakes.tiny_policy import VOCAB, random_groups, tiny_module, tiny_policy

V0 = WeightsName(1, 0)


def step_of(groups, algorithm=None, *, policy=None, version=1, reference=None, **trainer):
    """(gradient of the first update, outcome)"""
    policy = policy or tiny_policy()
    section = TrainerSection(
        **({"lr": 1e-2, "tokens_per_microbatch": 10_000, "max_grad_norm": 1e9} | trainer)
    )
    step = TrainStep(
        policy, algorithm or AlgorithmSection(), section, num_train_steps=10, reference=reference
    )
    outcome = step.apply(groups, version)
    state = step.optimizer._adamw.state
    first = [state[p]["exp_avg"].flatten() / 0.1 for p in policy.module.parameters()]
    return torch.cat(first), outcome


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def limited(aggregation):
    return AlgorithmSection(aggregation=aggregation, length_limit=9)


class NoisyPadding(PolicyModel):
    """Fills the padding at the end of each row with random ids before it looks at them."""

    num_filled = 0

    def logprobs(self, request):
        ids, length = request.input_ids.clone(), request.input_ids.shape[1]
        predicted = set(request.rows.tolist())
        for row, positions in enumerate(request.position_ids):
            start = int((positions == 0).nonzero().max())  # of the row's last segment
            span = range(row * length + start, (row + 1) * length)
            if predicted.isdisjoint(span):  # every real sequence predicts a trained token
                ids[row, start:] = torch.randint(VOCAB, (length - start,))
                self.num_filled += length - start
        noisy = LogprobRequest(
            ids, request.position_ids, request.rows, request.targets, request.temperature
        )
        return super().logprobs(noisy)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_b001_more_micro_batches_make_no_weaker_update(aggregation):
    groups = random_groups(2, version=1)
    expected, outcome = step_of(groups, limited(aggregation))
    for budget in (1, 20, 40):
        found, other = step_of(groups, limited(aggregation), tokens_per_microbatch=budget)
        same(found, expected)
        assert other.grad_norms[0] == pytest.approx(outcome.grad_norms[0], rel=1e-9)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_b004_shards_under_the_global_denominator_add_up(aggregation):
    groups = random_groups(4, version=1)
    expected, _ = step_of(groups, limited(aggregation))
    total, sizes = torch.zeros_like(expected), []
    for shard in (groups[:1], groups[1:]):  # 1 and 3 groups: shards of unlike size
        gradient, outcome = step_of(shard, limited(aggregation))
        counts = [s.num_trained for s in outcome.sequences]
        sizes.append(denominator(Rule(aggregation.value), counts, length=9))
        total += gradient * sizes[-1]
    # The model's norms compute in float32: another scale is another rounding.
    bound = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(total / sum(sizes), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_b017_random_values_in_padding_change_nothing(aggregation):
    groups = random_groups(4, version=1)
    expected, outcome = step_of(groups, limited(aggregation), tokens_per_microbatch=200)
    policy = NoisyPadding(tiny_module(), chunk_tokens=7)
    found, other = step_of(groups, limited(aggregation), policy=policy, tokens_per_microbatch=200)
    assert policy.num_filled > 10
    same(found, expected)
    assert other.losses[0] == pytest.approx(outcome.losses[0], rel=1e-9)


def completion(token_ids, *, prompt=(1, 2), temperature=1.0, logprobs=None):
    count = len(token_ids)
    return Completion(
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        token_ids=np.array(token_ids, dtype=np.int32),
        behavior_logprobs=np.full(count, -1.0, np.float32) if logprobs is None else logprobs,
        segments=[Segment(V0, count)],
        finish_reason=FinishReason.STOP,
        temperature=temperature,
    )


def test_b025_the_mask_comes_from_lengths_not_from_token_values():
    end = 5
    group = RolloutGroup(
        0, 1, 0,
        [
            Rollout([completion([3, 4, end])], 1.0),
            Rollout([completion([3, end, 4, end, end, 6, 7, 8, end])], 0.0),
        ],
    )  # fmt: skip
    gradient, outcome = step_of([group], version=0)
    assert [s.num_trained for s in outcome.sequences] == [3, 9]
    assert gradient.any()


def test_b026_batches_that_no_group_size_divides():
    groups = [
        RolloutGroup(group.group_id, 1, 0, group.rollouts[:size])
        for group, size in zip(random_groups(3, 8, version=1), (3, 8, 5), strict=True)
    ]
    expected, _ = step_of(groups)
    found, _ = step_of(groups, tokens_per_microbatch=25)
    assert expected.isfinite().all()
    same(found, expected)


def test_b011_tied_groups_feel_the_kl_term_and_are_counted_by_their_rewards():
    groups = random_groups(2, version=1)
    for rollout in groups[0].rollouts:
        rollout.reward = 1.0
    for kl_coef, moves in ((0.0, False), (0.1, True)):
        algorithm = AlgorithmSection(kl_coef=kl_coef, advantage="batch_std")
        reference = tiny_policy(seed=3) if kl_coef else None
        gradient, _ = step_of(groups[:1], algorithm, reference=reference)
        assert bool(gradient.any()) is moves
    assert group_metrics(groups, GeneratedStats(), [0.0, 0.0])["zero_variance_fraction"] == 0.5


def microbatches_of(groups, budget):
    sequences = sequences_of(groups, [[0.0] * len(g.rollouts) for g in groups])
    batches = make_microbatches(
        sequences, [1.0] * len(sequences), tokens_per_microbatch=budget,
        dtype=torch.float64, device=torch.device("cpu"),
    )  # fmt: skip
    return sequences, list(batches)


@torch.no_grad()
def logprobs_of(policy, groups, budget=10_000):
    """Of each completion, in order."""
    sequences, batches = microbatches_of(groups, budget)
    flat = torch.empty(sum(s.num_trained for s in sequences), dtype=torch.float64)
    for batch in batches:
        flat[batch.slots] = policy.logprobs(batch)[0]
    return list(flat.split([s.num_trained for s in sequences]))


def test_b018_b019_a_neighbor_of_another_length_changes_no_log_prob():
    rng = np.random.default_rng(3)
    rollouts = [
        Rollout(
            [completion(rng.integers(0, VOCAB, 6), prompt=tuple(rng.integers(0, VOCAB, length)))],
            float(length),
        )
        for length in (5, 45, 5, 45)
    ]
    policy = tiny_policy()
    together = logprobs_of(policy, [RolloutGroup(0, 1, 0, rollouts)])
    for found, rollout in zip(together, rollouts, strict=True):
        (alone,) = logprobs_of(policy, [RolloutGroup(0, 1, 0, [rollout])])
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-9)


def test_b019_positions_count_from_the_start_of_each_sequence():
    """Learned positions: rotary ones are relative, so a shift of all of them would not show."""
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    module = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=64, **shape))
    module = module.double().eval()
    with torch.no_grad():
        module.transformer.wpe.weight.mul_(50.0)
    prompts = [tuple(range(1, 1 + length)) for length in (2, 9, 5)]
    rollouts = [Rollout([completion([3, 1, 4], prompt=prompt)], 0.0) for prompt in prompts]
    policy = PolicyModel(module, chunk_tokens=7)
    found = logprobs_of(policy, [RolloutGroup(0, 1, 0, rollouts)])
    for prompt, logprobs in zip(prompts, found, strict=True):
        logits = module(torch.tensor([[*prompt, 3, 1, 4]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor([[3], [1], [4]])).squeeze(-1)
        torch.testing.assert_close(logprobs, expected.detach(), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def sampled_by(module, prompt, num_tokens, temperature, generator):
    """(ids, log-probs) by plain full forward passes, without the package's code."""
    ids, logprobs = list(prompt), []
    for _ in range(num_tokens):
        logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        distribution = (logits / temperature).log_softmax(-1)
        token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
        ids.append(token)
        logprobs.append(float(distribution[token]))
    return ids[len(prompt) :], np.array(logprobs, dtype=np.float32)


def lag0_group(temperature=1.0, module=None, version=0):
    module, generator = module or tiny_module(), torch.Generator().manual_seed(4)
    rollouts = []
    for member in range(4):
        prompt = [1 + member, 2, 3]
        ids, logprobs = sampled_by(module, prompt, 5 + member, temperature, generator)
        done = completion(ids, prompt=prompt, temperature=temperature, logprobs=logprobs)
        done.segments = [Segment(WeightsName(1, version), len(ids))]
        rollouts.append(Rollout([done], float(member)))
    return RolloutGroup(0, 1, 0, rollouts)


def largest_gap(group):
    _, outcome = step_of([group], version=0)
    facts = outcome.tokens
    return float((facts.policy_logprobs - facts.behavior_logprobs).abs().max())


def test_b020_at_lag_0_every_ratio_is_1_and_a_shift_by_one_is_seen():
    assert largest_gap(lag0_group()) < 1e-5
    shifted = lag0_group()
    for rollout in shifted.rollouts:
        rollout.sequences[0].behavior_logprobs = np.roll(rollout.sequences[0].behavior_logprobs, 1)
    assert largest_gap(shifted) > 0.1


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_b030_b033_log_probs_are_at_the_temperature_of_the_sample(temperature):
    assert largest_gap(lag0_group(temperature)) < 1e-5
    forgotten = lag0_group(temperature)
    for rollout in forgotten.rollouts:
        rollout.sequences[0].temperature = 1.0
    assert largest_gap(forgotten) > 0.1


@pytest.mark.parametrize("proximal", [Proximal.auto, Proximal.recompute])
def test_b033_a_pass_of_its_own_scores_at_the_same_temperature(proximal):
    group = lag0_group(0.7)
    _, outcome = step_of([group], AlgorithmSection(proximal=proximal), version=0)
    facts = outcome.tokens
    assert (facts.proximal_logprobs - facts.behavior_logprobs).abs().max() < 1e-5


def lag0_alarms(sample, num_steps=5):
    """Steps that raised the lag-0 alarm, its patience being 3; `sample` gets policy and version."""
    policy, algorithm = tiny_policy(), AlgorithmSection()
    step = TrainStep(policy, algorithm, TrainerSection(lr=3e-2), num_train_steps=num_steps)
    watched, raised = Alarms(AlarmsSection(patience=3)), []
    for version in range(num_steps):
        groups = [sample(policy, version)]
        outcome = step.apply(groups, version)
        gap = token_metrics(outcome, groups, version, algorithm)["logprob/lag0_gap"]
        raised += [version for event in watched.step({"logprob/lag0_gap": gap})]
    return raised


@pytest.mark.parametrize(("is_raw", "raised"), [(False, []), (True, [0, 2])])
def test_b032_log_probs_that_forget_the_temperature_raise_the_lag0_alarm(is_raw, raised):
    """Of a server that runs already nothing else tells while training: the probe's is 1."""

    def sample(policy, version):
        group = lag0_group(0.7, policy.module, version)
        sequences = [rollout.sequences[0] for rollout in group.rollouts]
        if is_raw:
            for sequence in sequences:
                sequence.temperature = 1.0
            for sequence, logprobs in zip(sequences, logprobs_of(policy, [group]), strict=True):
                sequence.behavior_logprobs = logprobs.float().numpy()
                sequence.temperature = 0.7
        return group

    assert lag0_alarms(sample) == raised


@pytest.mark.parametrize(("is_frozen", "raised"), [(False, []), (True, [1, 3])])
def test_b064_weights_that_stay_while_their_name_moves_on_raise_the_lag0_alarm(is_frozen, raised):
    """Rolled back after the probe has passed: the first step without the weights of its name."""
    start = tiny_module()
    assert raised == lag0_alarms(
        lambda policy, version: lag0_group(1.0, start if is_frozen else policy.module, version)
    )


def test_b036_b037_no_token_value_is_special():
    """An end that is also the padding (0), and a prompt that holds it."""
    group = RolloutGroup(
        0, 1, 0,
        [
            Rollout([completion([5, 6, 0], prompt=(0, 3, 0))], 1.0),
            Rollout([completion([7, 0], prompt=(0, 3, 0))], 0.0),
        ],
    )  # fmt: skip
    _, outcome = step_of([group], version=0, tokens_per_microbatch=64)
    assert [s.num_trained for s in outcome.sequences] == [3, 2]
    ends = [int(s.token_ids[-1]) for s in outcome.sequences]
    assert ends == [0, 0]
    assert all(s.trained[-1] for s in outcome.sequences)
    changed = copy.deepcopy(group)
    changed.rollouts[0].sequences[0].token_ids[-1] = 9  # the end has a gradient of its own
    before, _ = step_of([group], version=0)
    after, _ = step_of([changed], version=0)
    assert not torch.allclose(before, after)
