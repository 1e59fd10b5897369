"""Section `algorithm`: the objective."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.config.ranges import not_negative, positive


class Advantage(StrEnum):
    """Group advantage: z-score (GRPO) or centred reward only (Dr. GRPO)."""

    grpo = "grpo"
    mean_only = "mean_only"


class Aggregation(StrEnum):
    """How per-token losses become one number; the denominator is always the global batch's."""

    token_mean = "token_mean"
    sequence_mean_token_mean = "sequence_mean_token_mean"


class ZeroVariance(StrEnum):
    """What becomes of a group whose rewards are all equal."""

    drop = "drop"
    keep = "keep"


@dataclass(kw_only=True)
class AlgorithmSection:
    """The objective."""

    advantage: Advantage = Advantage.grpo
    """grpo: (R - mean) / (population std + advantage_eps); mean_only: R - mean."""
    advantage_eps: float = 1e-8
    """Added to the std."""
    zero_variance: ZeroVariance = ZeroVariance.drop
    """drop: a group whose rewards are all equal ends as no_signal; keep: it is trained, with
    advantage 0, and counts in the denominator."""
    clip_low: float = 0.2
    """importance_ratio is bounded below by 1 - clip_low."""
    clip_high: float = 0.28
    """importance_ratio is bounded above by 1 + clip_high."""
    dual_clip: float = 3.0
    """For negative advantages the loss is bounded by dual_clip * |A|; must exceed 1 + clip_high."""
    behavior_weight_cap: float = 2.0
    """Upper truncation of pi_prox / pi_behavior, per token."""
    aggregation: Aggregation = Aggregation.token_mean
    """token_mean over the global batch, or sequence_mean_token_mean."""
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL against the frozen initial policy; 0: no reference model."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from not_negative(where, self, "kl_coef", "advantage_eps")
        yield from positive(where, self, "clip_high", "behavior_weight_cap")
        if not 0 < self.clip_low < 1:
            yield f"{where}.clip_low must be between 0 and 1, got {self.clip_low}"
        if self.dual_clip <= 1 + self.clip_high:
            yield f"{where}.dual_clip must exceed 1 + clip_high, got {self.dual_clip}"
