"""Values that cross a boundary between parts. numpy only: tensors never appear here.

Log-probabilities are in nats, float32, at the sampling temperature, of the full distribution.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class WeightsName(NamedTuple):
    """Name of a set of weights: `{incarnation}.{policy_version}`.

    Example: `WeightsName(1, 107)` prints as `1.107`. It is SGLang's `weight_version` and the
    prefix-cache namespace of every request.
    """

    incarnation: int
    policy_version: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.policy_version}"

    @classmethod
    def parse(cls, text: str) -> "WeightsName | None":
        """The name in `text`, or None if it is not one (an engine's own checkpoint weights)."""
        head, dot, tail = text.partition(".")
        if dot and head.isdecimal() and tail.isdecimal():
            return cls(int(head), int(tail))
        return None


class TicketKind(StrEnum):
    """What a group is produced for."""

    TRAIN = "train"
    EVAL = "eval"


class DropReason(StrEnum):
    """Why a ticket ended untrained."""

    STALE = "stale"
    NO_SIGNAL = "no_signal"
    GENERATION_FAILED = "generation_failed"
    REWARD_FAILED = "reward_failed"
    INVALID = "invalid"


class ReissueReason(StrEnum):
    """Why an attempt ended while its ticket goes on as attempt + 1."""

    CLAIM_LOST = "claim_lost"
    SUPERSEDED = "superseded"
    REQUEUED = "requeued"
    ROLLED_BACK = "rolled_back"
    LOST = "lost"


class InsertOutcome(StrEnum):
    """The replay server's answer to an insert."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    STALE = "stale"
    FULL = "full"
    INVALID = "invalid"
    FENCED = "fenced"


class RewardOutcome(StrEnum):
    """What became of scoring one completion. Only `SCORED` has a reward."""

    SCORED = "scored"
    UNPARSEABLE = "unparseable"
    ERROR = "error"
    TIMEOUT = "timeout"


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True, frozen=True)
class Ticket:
    """Permission to produce one group: attempt `attempt` of `group_id`."""

    group_id: int
    attempt: int
    prompt_index: int
    kind: TicketKind = TicketKind.TRAIN


@dataclass(slots=True, frozen=True)
class Prompt:
    """One prompt to solve. The ids are the truth; text is for rewards and people."""

    index: int
    text: str
    token_ids: list[int]
    answer: str
    """What the reward compares with; the task defines its meaning."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Segment:
    """A run of tokens sampled under one set of weights."""

    weights: WeightsName | None
    """None: tokens that no policy sampled (a tool's answer in a multi-turn rollout)."""
    num_tokens: int
    trainable: bool = True
    kv_mixed: bool = False
    """The prefix's KV entries were made under older weights, so no single policy reproduces
    the log-probs of this run."""


@dataclass(slots=True)
class Completion:
    """One sampled answer, or one sequence of a multi-turn rollout."""

    prompt_token_ids: Int32Array
    """[num_prompt_tokens] int32"""
    token_ids: Int32Array
    """[num_tokens] int32, the stop token included if it was sampled"""
    behavior_logprobs: Float32Array
    """[num_tokens] float32, nats, at `temperature`"""
    segments: list[Segment]
    """in order; their `num_tokens` add up to num_tokens"""
    finish_reason: FinishReason
    temperature: float
    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """further named per-token arrays, first dimension num_tokens (routed experts, ...)"""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return int(self.token_ids.shape[0])


@dataclass(slots=True)
class Rollout:
    """A scored completion; several sequences when the rollout had several turns."""

    sequences: list[Completion]
    reward: float
    reward_parts: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens over all sequences."""
        return sum(sequence.num_tokens for sequence in self.sequences)


@dataclass(slots=True)
class RolloutGroup:
    """`group_size` rollouts of one prompt: the unit of transport, admission and rejection."""

    group_id: int
    attempt: int
    prompt_index: int
    rollouts: list[Rollout]
    kind: TicketKind = TicketKind.TRAIN
    generator: str = ""
    engine_id: str = ""
    started_s: float = 0.0
    """seconds from claim to insert start, measured by the generator's monotonic clock"""
    sampled_ago_s: float = 0.0
    """mean over tokens of (insert time - sampling time), generator's monotonic clock"""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of the group."""
        return sum(rollout.num_tokens for rollout in self.rollouts)

    def weights_tokens(self) -> Counter[WeightsName]:
        """Trainable tokens by the weights that sampled them."""
        tokens: Counter[WeightsName] = Counter()
        for rollout in self.rollouts:
            for sequence in rollout.sequences:
                for segment in sequence.segments:
                    if segment.weights is not None and segment.trainable and segment.num_tokens:
                        tokens[segment.weights] += segment.num_tokens
        return tokens

    def oldest_weights(self) -> WeightsName | None:
        """The oldest weights that sampled a trainable token; None if there is no such token."""
        return min(self.weights_tokens(), default=None)
