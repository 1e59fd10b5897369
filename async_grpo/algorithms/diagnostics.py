"""Off-policy statistics of a batch of trained tokens: how far apart two policies are.

All take flat tensors of trained tokens only (no padding: exp(0 - 0) = 1 would poison the means)
and return floats. Nothing here is differentiated. Which weights they are given is the caller's
matter, and matters: raw ones tell of the mismatch, bounded ones of what was trained.
"""

import torch
from torch import Tensor

from async_grpo.algorithms.importance import RatioLevel, log_ratio
from async_grpo.algorithms.sequences import Sequences


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) = 1 / (1 + cv^2), in (0, 1]; nan for no weights or all of them 0.

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


def one_per_sequence(values: Tensor, sequences: Sequences) -> Tensor:
    """[S] of values [N] that are the same for all tokens of a sequence."""
    first = sequences.lengths.cumsum(0) - sequences.lengths
    return values[first]


@torch.no_grad()
def sequence_divergence(
    sampling_logprobs: Tensor, other_logprobs: Tensor, sequences: Sequences
) -> dict[str, float]:
    """chi2 and ess of the weights of whole sequences, the products of their tokens'."""
    if not sampling_logprobs.numel():
        return {}
    log_w = log_ratio(
        other_logprobs, sampling_logprobs, level=RatioLevel.sequence, sequences=sequences
    )
    w = one_per_sequence(log_w.double().exp(), sequences)
    return {"chi2": float(w.square().mean() - 1), "ess": effective_sample_size(w)}


@torch.no_grad()
def perplexity(
    sampling_logprobs: Tensor, other_logprobs: Tensor, sequences: Sequences
) -> dict[str, float]:
    """Perplexities per sequence and the gap between their logarithms, means over sequences.

    Returns:
        sampling, other: exp(-mean log-prob); log_gap: mean of log ppl(other) - log ppl(sampling);
        log_abs_gap: of its absolute value; ratio: of its exponential.
    """
    if not sampling_logprobs.numel():
        return {}
    sampling = sequences.mean(sampling_logprobs.double())
    other = sequences.mean(other_logprobs.double())
    gap = sampling - other
    return {
        "sampling": float((-sampling).exp().mean()),
        "other": float((-other).exp().mean()),
        "log_gap": float(gap.mean()),
        "log_abs_gap": float(gap.abs().mean()),
        "ratio": float(gap.exp().mean()),
    }


def fraction(selected: Tensor) -> float:
    """Share of True; nan for nothing."""
    return float(selected.double().mean()) if selected.numel() else float("nan")
