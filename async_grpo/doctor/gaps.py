"""Differences between two parties' log-probs of the same tokens, and which of them are noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_grpo.config.policy import DType
from async_grpo.config.weights import NOISE_MARGIN
from async_grpo.errors import GenerationError


@dataclass(frozen=True, slots=True)
class Gap:
    """|difference| of log-probs, in nats."""

    mean: float
    p99: float
    max: float
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.2g}, p99 {self.p99:.2g}, max {self.max:.2g} nats over "
            f"{self.num_tokens} tokens"
        )

    def values(self, prefix: str = "") -> dict[str, float]:
        """For programs."""
        return {
            f"{prefix}mean": self.mean,
            f"{prefix}p99": self.p99,
            f"{prefix}max": self.max,
            f"{prefix}num_tokens": float(self.num_tokens),
        }


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest gap that rounding explains, in nats."""

    mean: float
    p99: float

    def above(self, noise: float) -> "Limits":
        """Not below what the policy's own rounding, as a mean in nats, makes likely."""
        mean = NOISE_MARGIN * noise
        return Limits(max(self.mean, mean), max(self.p99, _P99_TO_MEAN * mean))

    def hold(self, gap: Gap) -> bool:
        """Written so that a NaN fails."""
        return gap.mean <= self.mean and gap.p99 <= self.p99


_P99_TO_MEAN = 6.0
"""Of |log-prob differences| by rounding, which are nearly exponentially distributed."""

LIMITS = {
    DType.float64: Limits(mean=1e-4, p99=1e-3),  # engines sample in float32 at best
    DType.float32: Limits(mean=1e-4, p99=1e-3),
    DType.bfloat16: Limits(mean=0.03, p99=0.3),
}
"""The least ones by the policy's dtype; a model whose rounding is larger has larger ones."""


def gap_between(found: Sequence[float], expected: Sequence[float]) -> Gap:
    """The gap of two parties' log-probs of the same tokens.

    Raises:
        GenerationError: there are none, or not as many.
    """
    if not found or len(found) != len(expected):
        raise GenerationError(
            f"{len(found)} log-probs to compare with {len(expected)}", retryable=False
        )
    size = np.abs(np.subtract(found, expected, dtype=np.float64))
    return Gap(
        mean=float(size.mean()),
        p99=float(np.quantile(size, 0.99)),
        max=float(size.max()),
        num_tokens=len(size),
    )
