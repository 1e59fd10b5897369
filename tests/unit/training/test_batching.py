import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.training.batching import make_microbatches, pack, sequences_of
from async_grpo.types import Completion, FinishReason, Rollout, RolloutGroup, Segment, WeightsName
from tests.fakes.tiny_policy import random_groups


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    budget=st.sampled_from([1, 16, 100, 512]),
)
@settings(deadline=None, max_examples=60)
def test_packing_holds_every_sequence_once_within_the_budget(lengths, budget):
    seen = []
    for rows in pack(lengths, budget):
        used = [sum(lengths[index] for index in row) for row in rows]
        assert all(rows)
        assert len(rows) * max(used) <= budget or (len(rows) == 1 and len(rows[0]) == 1)
        seen += [index for row in rows for index in row]
    assert sorted(seen) == list(range(len(lengths)))


def test_a_group_of_short_sequences_is_packed_densely():
    lengths = [13] * 256
    batches = list(pack(lengths, 4096))
    rows = [row for batch in batches for row in batch]
    assert sum(lengths) / (len(rows) * 64) > 0.8


def microbatches(groups, budget):
    sequences = sequences_of(groups, [[1.0] * len(g.rollouts) for g in groups])
    batches = make_microbatches(
        sequences, [1.0] * len(sequences), tokens_per_microbatch=budget,
        dtype=torch.float64, device=torch.device("cpu"),
    )  # fmt: skip
    return sequences, list(batches)


@pytest.mark.parametrize("budget", [8, 40, 1000])
def test_each_trained_token_meets_its_own_prefix(budget):
    groups = random_groups(3)
    sequences, batches = microbatches(groups, budget)
    found = {}
    for batch in batches:
        flat_ids, flat_positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        for row, target, slot, behavior in zip(
            batch.rows.tolist(), batch.targets.tolist(), batch.slots.tolist(),
            batch.behavior_logprobs.tolist(), strict=True,
        ):  # fmt: skip
            start = row - int(flat_positions[row])
            found[slot] = (flat_ids[start : row + 1].tolist(), target, behavior)
    slot = 0
    for sequence in sequences:
        for token in range(len(sequence.trained)):
            end = sequence.num_prompt_tokens + token
            prefix, target, behavior = found[slot]
            assert prefix == sequence.token_ids[:end].tolist()
            assert target == sequence.token_ids[end]
            assert behavior == sequence.behavior_logprobs[token]
            slot += 1
    assert slot == len(found)


def completion(segments, count=4):
    return Completion(
        prompt_token_ids=np.array([1, 2], dtype=np.int32),
        token_ids=np.arange(count, dtype=np.int32),
        behavior_logprobs=np.full(count, -1.0, dtype=np.float32),
        segments=segments,
        finish_reason=FinishReason.STOP,
        temperature=1.0,
    )


def test_only_sampled_trainable_tokens_are_trained():
    weights = WeightsName(1, 0)
    sampled = Segment(weights, 2)
    group = RolloutGroup(
        0, 0, 0,
        [
            Rollout([completion([sampled, Segment(None, 1), Segment(weights, 1)])], 1.0),
            Rollout([completion([Segment(weights, 4, trainable=False)])], 0.0),
        ],
    )  # fmt: skip
    sequences = sequences_of([group], [[1.0, -1.0]])
    assert len(sequences) == 1
    assert sequences[0].trained.tolist() == [True, True, False, True]
    assert sequences[0].num_trained == 3


def test_lengths_that_differ_are_refused():
    group = RolloutGroup(0, 0, 0, [Rollout([completion([Segment(WeightsName(1, 0), 3)])], 1.0)])
    with pytest.raises(ValueError, match="3 tokens in segments"):
        sequences_of([group], [[1.0]])
