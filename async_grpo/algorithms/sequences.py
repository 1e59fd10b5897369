"""Which sequence each token of a packed batch belongs to, and reductions over sequences.

Knows nothing of what the tokens are. N = tokens, S = sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokens [N] of S whole sequences; the tokens of one are contiguous and in order."""

    index: Tensor
    """[N] int64 in [0, S), never falling"""
    count: int
    """S"""

    @classmethod
    def of(cls, names: Tensor) -> "Sequences":
        """From any name per token: a run of equal names is one sequence."""
        unique, index = torch.unique_consecutive(names, return_inverse=True)
        return cls(index, int(unique.shape[0]))

    @property
    def lengths(self) -> Tensor:
        """[S] int64."""
        return torch.bincount(self.index, minlength=self.count)

    def sum(self, values: Tensor) -> Tensor:
        """[S]; gradients flow."""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """[S]; gradients flow."""
        return self.sum(values) / self.lengths

    def min(self, values: Tensor) -> Tensor:
        """[S], no gradient."""
        start = torch.full((self.count,), torch.inf, dtype=values.dtype, device=values.device)
        return start.scatter_reduce(0, self.index, values.detach(), "amin")

    def prefix_sum(self, values: Tensor) -> Tensor:
        """[N]: of the tokens of the sequence up to this one, itself included."""
        ends = self.lengths.cumsum(0)
        running = values.cumsum(0)
        before = torch.where(ends[:-1] > 0, running[ends[:-1] - 1], 0.0)
        return running - torch.cat([running.new_zeros(1), before])[self.index]

    def spread(self, values: Tensor) -> Tensor:
        """[S] -> [N]: each token gets its sequence's value."""
        return values[self.index]
