"""Off-policy statistics of a batch of trained tokens: how far apart two policies are.

All take flat tensors of trained tokens only (no padding: exp(0 - 0) = 1 would poison the means)
and return floats. Nothing here is differentiated.
"""

import torch
from torch import Tensor

from async_grpo.algorithms.importance import log_ratio


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) = 1 / (1 + cv^2), in (0, 1]; nan for no weights.

    On weights truncated at a cap it is bounded from below and hides the tail: log both.
    """
    if not weights.numel():
        return float("nan")
    weights = weights.double()
    return float(weights.sum().square() / (weights.numel() * weights.square().sum()))


@torch.no_grad()
def ratio_statistics(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> dict[str, float]:
    """mean, min and max of w = p / q, over tokens."""
    if not numerator_logprobs.numel():
        return {}
    ratio = log_ratio(numerator_logprobs, denominator_logprobs).double().exp()
    return {
        "mean": float(ratio.mean()),
        "min": float(ratio.min()),
        "max": float(ratio.max()),
    }


@torch.no_grad()
def divergence(sampling_logprobs: Tensor, other_logprobs: Tensor) -> dict[str, float]:
    """Estimates of KL(sampling || other) from tokens of the sampling policy, and kin.

    Returns:
        k1: mean of log(q / p); k3: mean of w - log w - 1, with w = p / q, q the sampling policy;
        chi2: mean w^2 - 1; m2: mean (log w)^2; ess: effective sample size of w as a fraction.
    """
    if not sampling_logprobs.numel():
        return {}
    log_w = log_ratio(other_logprobs, sampling_logprobs).double()
    w = log_w.exp()
    return {
        "k1": float(-log_w.mean()),
        "k3": float((w - log_w - 1).mean()),
        "chi2": float(w.square().mean() - 1),
        "m2": float(log_w.square().mean()),
        "ess": effective_sample_size(w),
    }


def fraction(selected: Tensor) -> float:
    """Share of True; nan for nothing."""
    return float(selected.double().mean()) if selected.numel() else float("nan")
