"""What a train step knows of each trained token: before its updates, and after.

All tensors are [B], the trained tokens of the whole batch in its order; a micro-batch's part is
`tensor[batch.slots]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from async_grpo.algorithms.losses import PolicyLoss
from async_grpo.algorithms.sequences import Sequences
from async_grpo.training.batching import MicroBatch, TrainSequence
from async_grpo.training.model import PolicyModel


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """Known before any forward pass."""

    behavior_logprobs: Tensor
    advantages: Tensor
    versions: Tensor
    """int64"""
    truncated: Tensor
    """bool: of a sequence that was cut by its length"""
    sequences: Sequences

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence], policy: PolicyModel) -> "BatchTokens":
        """From all sequences of the batch, in order."""
        dtype, device = policy.accumulation_dtype, policy.device
        counts = torch.tensor([s.num_trained for s in sequences])
        behavior = np.concatenate([s.behavior_logprobs[s.trained] for s in sequences])
        versions = np.concatenate([s.versions[s.trained] for s in sequences])

        def per_sequence(values: list[float], kind: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=kind).repeat_interleave(counts).to(device)

        index = torch.arange(len(sequences)).repeat_interleave(counts).to(device)
        return cls(
            behavior_logprobs=torch.from_numpy(behavior).to(device, dtype),
            advantages=per_sequence([s.advantage for s in sequences], dtype),
            versions=torch.from_numpy(versions).to(device),
            truncated=per_sequence([s.truncated for s in sequences], torch.bool),
            sequences=Sequences(index, len(sequences)),
        )


@dataclass(slots=True)
class TokenFacts:
    """What the step saw, detached."""

    policy_logprobs: Tensor
    """by the weights that the token's update started from"""
    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    entropy: Tensor
    behavior_weight_raw: Tensor
    """before its bounds; 1 without a behavior weight"""
    behavior_weight: Tensor
    """as it multiplied the loss"""
    weight_bounded: Tensor
    """bool: the bounds changed it"""
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor
    kept: Tensor
    """bool: no mask rejected it; its loss counted"""
    rejected: dict[str, Tensor]
    """name of the mask -> bool"""
    reference_kl: Tensor | None
    sequences: Sequences
    num_first_update: int = 0
    """the first so many tokens were trained by the step's first update"""
    weighted: bool = field(default=True)
    """whether the objective has a behavior weight"""

    @classmethod
    def empty(
        cls, policy: PolicyModel, tokens: BatchTokens, *, with_reference: bool, weighted: bool
    ) -> "TokenFacts":
        """To be filled by `record`."""
        count = tokens.versions.shape[0]

        def filled(dtype: torch.dtype = policy.accumulation_dtype, value: float = 0) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=policy.device)

        return cls(
            policy_logprobs=filled(),
            proximal_logprobs=filled(),
            behavior_logprobs=tokens.behavior_logprobs,
            entropy=filled(),
            behavior_weight_raw=filled(value=1),
            behavior_weight=filled(value=1),
            weight_bounded=filled(torch.bool),
            clipped_low=filled(torch.bool),
            clipped_high=filled(torch.bool),
            clipped_dual=filled(torch.bool),
            kept=filled(torch.bool, True),
            rejected={},
            reference_kl=filled() if with_reference else None,
            sequences=tokens.sequences,
            weighted=weighted,
        )

    def record(
        self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, result: PolicyLoss
    ) -> None:
        """What one micro-batch showed."""
        slots = batch.slots
        self.policy_logprobs[slots] = logprobs
        self.entropy[slots] = entropy
        if result.weight is not None:
            self.behavior_weight_raw[slots] = result.weight.raw
            self.behavior_weight[slots] = result.weight.applied
            self.weight_bounded[slots] = result.weight.bounded
        self.clipped_low[slots] = result.surrogate.clipped_low
        self.clipped_high[slots] = result.surrogate.clipped_high
        self.clipped_dual[slots] = result.surrogate.clipped_dual
        self.kept[slots] = result.kept
        for name, mask in result.rejected.items():
            if name not in self.rejected:
                self.rejected[name] = torch.zeros_like(self.kept)
            self.rejected[name][slots] = mask
        if self.reference_kl is not None and result.reference_kl is not None:
            self.reference_kl[slots] = result.reference_kl
