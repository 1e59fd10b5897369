"""Rollout groups -> packed micro-batches. Knows nothing of models, losses or versions' meaning.

A micro-batch is R rows of L tokens. A row holds whole sequences one after another, each with
`position_ids` from 0; without an attention mask the model then builds a block-diagonal causal
mask by itself. Attention costs L^2 per row, so L is the longest sequence of the micro-batch and
not the whole token budget. Inputs and targets are cut from each sequence *before* packing, so
nothing is ever predicted across a border.

Shapes: R = rows, L = row length, N = trained tokens of a micro-batch, B = of the whole batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_grpo.algorithms.sequences import Sequences
from async_grpo.algorithms.staleness import token_versions
from async_grpo.types import Completion, FinishReason, RolloutGroup

MIN_ROW_TOKENS = 64
"""Rows are at least this long, so that short sequences share one. Measured with 256 sequences of
14 tokens on a CPU thread: rows of 16, 64, 256 and 2048 tokens took 0.30, 0.29, 0.39, 1.47 s."""


@dataclass(slots=True)
class TrainSequence:
    """One sequence to train on."""

    group: int
    """position of its group in the batch"""
    token_ids: npt.NDArray[np.int64]
    """prompt and completion"""
    num_prompt_tokens: int
    trained: npt.NDArray[np.bool_]
    """[num_tokens] sampled by a policy and trainable"""
    behavior_logprobs: npt.NDArray[np.float32]
    """[num_tokens]"""
    versions: npt.NDArray[np.int64]
    """[num_tokens] policy version that sampled each; -1 where not trained"""
    advantage: float
    temperature: float
    pure: bool
    """one segment, no mixed KV: a single policy reproduces its log-probs"""
    num_trained: int
    """trained tokens"""
    first_slot: int = 0
    """position of its first trained token in the batch's order"""
    truncated: bool = False
    """it was cut by its length"""
    weight: float = 1.0
    """of its loss, beside others of the batch"""

    @property
    def num_input_tokens(self) -> int:
        """Tokens that the model reads: all but the last, which predicts nothing."""
        return len(self.token_ids) - 1


@dataclass(slots=True)
class MicroBatch:
    """Tensors of one forward and backward; the trained tokens flattened to [N]."""

    input_ids: Tensor
    """[R, L] int64"""
    position_ids: Tensor
    """[R, L] int64, restarting with each sequence"""
    rows: Tensor
    """[N] int64, positions in the flattened [R * L] whose hidden state predicts a trained token"""
    targets: Tensor
    """[N] int64"""
    slots: Tensor
    """[N] int64, position of each trained token in the order of the whole batch, [0, B)"""
    behavior_logprobs: Tensor
    advantages: Tensor
    temperature: Tensor
    weights: Tensor
    """[N] weight of each token's loss, before the division by the denominator"""
    sequences: Sequences
    """[N] which sequence of this micro-batch each trained token is of"""

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return int(self.targets.shape[0])


def _sequence(
    group: int, completion: Completion, advantage: float, oldest_version: int
) -> TrainSequence:
    versions = np.asarray(token_versions(completion.segments), dtype=np.int64)
    versions[versions < oldest_version] = -1
    trained = versions >= 0
    if not len(versions) == completion.num_tokens == len(completion.behavior_logprobs):
        raise ValueError(
            f"{completion.num_tokens} tokens, {len(completion.behavior_logprobs)} log-probs and "
            f"{len(versions)} tokens in segments"
        )
    if not len(completion.prompt_token_ids):
        raise ValueError("a completion without a prompt: its first token has no prediction")
    token_ids = np.concatenate([completion.prompt_token_ids, completion.token_ids])
    return TrainSequence(
        group=group,
        token_ids=token_ids.astype(np.int64),
        num_prompt_tokens=len(completion.prompt_token_ids),
        trained=trained,
        behavior_logprobs=completion.behavior_logprobs,
        versions=versions,
        advantage=advantage,
        temperature=completion.temperature,
        pure=len(completion.segments) == 1 and not completion.segments[0].kv_mixed,
        num_trained=int(trained.sum()),
        truncated=completion.finish_reason is FinishReason.LENGTH,
    )


def sequences_of(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[Sequence[float]],
    *,
    oldest_version: int = 0,
    weights: Sequence[float] | None = None,
) -> list[TrainSequence]:
    """All sequences with a trained token, in the order of the batch.

    Args:
        groups: the drawn groups.
        advantages: one per rollout of each group; all sequences of a rollout share it.
        oldest_version: tokens of earlier versions are context only, as if nobody could train them.
        weights: of each group, scaled here to a mean of 1; None: all the same.

    Raises:
        ValueError: lengths of tokens, log-probs and segments differ, or a prompt is empty.
    """
    found = [
        _sequence(position, completion, advantage, oldest_version)
        for position, (group, values) in enumerate(zip(groups, advantages, strict=True))
        for rollout, advantage in zip(group.rollouts, values, strict=True)
        for completion in rollout.sequences
    ]
    if weights is not None:
        for sequence in found:
            sequence.weight = weights[sequence.group] * len(groups) / sum(weights)
    kept = [sequence for sequence in found if sequence.num_trained]
    slot = 0
    for sequence in kept:
        sequence.first_slot = slot
        slot += sequence.num_trained
    return kept


def pack(lengths: Sequence[int], tokens_per_microbatch: int) -> Iterator[list[list[int]]]:
    """First-fit-decreasing: micro-batches of rows of indices into `lengths`.

    R * L <= tokens_per_microbatch, unless a single sequence is longer: it gets a micro-batch of
    its own, since sequences are never split.
    """
    remaining = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while remaining:
        row_tokens = _row_tokens(lengths[remaining[0]], tokens_per_microbatch)
        rows: list[list[int]] = []
        room: list[int] = []
        left: list[int] = []
        max_rows = max(1, tokens_per_microbatch // row_tokens)
        for index in remaining:
            row = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
            if row is None and len(rows) < max_rows:
                rows.append([])
                room.append(row_tokens)
                row = len(rows) - 1
            if row is None:
                left.append(index)
                continue
            rows[row].append(index)
            room[row] -= lengths[index]
        yield rows
        remaining = left


def _row_tokens(longest: int, tokens_per_microbatch: int) -> int:
    return max(longest, min(MIN_ROW_TOKENS, tokens_per_microbatch))


def make_microbatches(
    sequences: Sequence[TrainSequence],
    token_weights: Sequence[float],
    *,
    tokens_per_microbatch: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[MicroBatch]:
    """Pack `sequences`; each micro-batch goes to the device when its turn comes.

    Args:
        sequences: each with at least one trained token.
        token_weights: weight of each trained token of each sequence.
        tokens_per_microbatch: see `pack`.
        dtype: of log-probs, advantages, temperatures and weights: float32 or better.
        device: where the tensors go.
    """
    for rows in pack([s.num_input_tokens for s in sequences], tokens_per_microbatch):
        columns = _Columns(rows, sequences)
        for row, indices in enumerate(rows):
            for index in indices:
                columns.add(row, sequences[index], token_weights[index])
        yield columns.tensors(dtype, device)


class _Columns:
    """Arrays of one micro-batch while its sequences are put in."""

    def __init__(self, rows: list[list[int]], sequences: Sequence[TrainSequence]) -> None:
        used = [sum(sequences[index].num_input_tokens for index in row) for row in rows]
        self._row_tokens = max(used)
        self._cursor = [0] * len(rows)
        shape = (len(rows), self._row_tokens)
        self._input_ids = np.zeros(shape, dtype=np.int64)
        # padding counts from 0 too: a segment of its own, so it never touches a real one
        self._position_ids = np.zeros(shape, dtype=np.int64)
        for row, filled in enumerate(used):
            self._position_ids[row, filled:] = np.arange(self._row_tokens - filled)
        self._integers: list[tuple[npt.NDArray[np.int64], ...]] = []
        self._floats: list[npt.NDArray[np.float64]] = []

    def add(self, row: int, sequence: TrainSequence, weight: float) -> None:
        """Append `sequence` to `row`."""
        start, count = self._cursor[row], sequence.num_input_tokens
        self._cursor[row] += count
        self._input_ids[row, start : start + count] = sequence.token_ids[:-1]
        self._position_ids[row, start : start + count] = np.arange(count)
        trained = np.flatnonzero(sequence.trained)
        source = trained + sequence.num_prompt_tokens - 1  # the position that predicts the token
        self._integers.append(
            (
                row * self._row_tokens + start + source,
                sequence.token_ids[source + 1],
                sequence.first_slot + np.arange(len(trained)),
            )
        )
        floats = np.empty((4, len(trained)))
        floats[0] = sequence.behavior_logprobs[trained]
        floats[1:] = [[sequence.advantage], [sequence.temperature], [weight]]
        self._floats.append(floats)

    def tensors(self, dtype: torch.dtype, device: torch.device) -> MicroBatch:
        """The finished micro-batch."""

        def integers(column: int) -> Tensor:
            parts = [entry[column] for entry in self._integers]
            return torch.from_numpy(np.concatenate(parts)).to(device)

        floats = torch.from_numpy(np.concatenate(self._floats, axis=1)).to(device, dtype)
        counts = [len(slots) for _, _, slots in self._integers]
        index = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        return MicroBatch(
            input_ids=torch.from_numpy(self._input_ids).to(device),
            position_ids=torch.from_numpy(self._position_ids).to(device),
            rows=integers(0),
            targets=integers(1),
            slots=integers(2),
            behavior_logprobs=floats[0],
            advantages=floats[1],
            temperature=floats[2],
            weights=floats[3],
            sequences=Sequences(index.to(device), len(counts)),
        )
