"""Rejection masks: which tokens are not trained at all. True means rejected; no gradient.

w = pi_prox / pi_behavior. A comparison with a number that is not one rejects nothing: a broken
log-prob must surface in the loss, never vanish in a mask. All shapes are [N], packed tokens.
"""

from enum import StrEnum

import torch
from torch import Tensor

from async_grpo.algorithms.importance import RatioLevel, log_difference, log_ratio
from async_grpo.algorithms.sequences import Sequences


class M2Tokens(StrEnum):
    """Which tokens the second moment is taken over."""

    trust_region = "trust_region"
    """those whose ratio moved along their advantage (the paper's Algorithm 1)"""
    all = "all"
    """every token"""


def outside(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    sequences: Sequences,
    *,
    level: RatioLevel,
    low: float | None,
    high: float | None,
) -> Tensor:
    """W of the level is below `low` or above `high` (None: no bound).

    Source: token: arXiv:2512.16144 (INTELLECT-3); sequence and geometric: rejection sampling of
    whole sequences, as verl and TRL do.
    """
    log_w = log_ratio(proximal_logprobs, behavior_logprobs, level=level, sequences=sequences)
    w = log_w.detach().exp()
    rejected = torch.zeros_like(w, dtype=torch.bool)
    if low is not None:
        rejected |= w < low
    if high is not None:
        rejected |= w > high
    return rejected


def veto(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, sequences: Sequences, *, threshold: float
) -> Tensor:
    """The whole sequence, if w of any of its tokens is below `threshold` (1e-4 to 1e-6 in use)."""
    w = log_ratio(proximal_logprobs, behavior_logprobs).detach().exp()
    return sequences.spread(sequences.min(w) < threshold)


def opsm(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    *,
    delta: float,
) -> Tensor:
    """The whole sequence, if A < 0 and the mean of log(pi_behavior / pi_prox) exceeds `delta`.

    Source: arXiv:2512.02556 (off-policy sequence masking).
    """
    gap = sequences.mean(-log_difference(proximal_logprobs, behavior_logprobs).detach())
    return (advantages < 0) & sequences.spread(gap > delta)


def m2(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    *,
    threshold: float,
    tokens: M2Tokens = M2Tokens.trust_region,
) -> Tensor:
    """The tokens of largest (log w)^2, until the mean over the rest of the pool is low enough.

    Pools all tokens it is given: give it the whole batch. The mean left is <= threshold for the
    trust region (A > 0 and w > 1, or A < 0 and w < 1) and < threshold for all tokens; tokens out
    of the pool stay.

    Source: arXiv:2510.01161 (M2PO), Algorithm 1; pooling all tokens as AReaL does.
    """
    log_w = log_difference(proximal_logprobs, behavior_logprobs).detach().double()
    pooled = torch.ones_like(log_w, dtype=torch.bool)
    if tokens is M2Tokens.trust_region:
        pooled = log_w * advantages > 0
    places = pooled.nonzero().flatten()
    order = places[log_w[places].square().argsort(stable=True)]
    running = log_w[order].square().cumsum(0)
    mean = running / torch.arange(1, len(order) + 1, device=running.device)
    high = mean > threshold if tokens is M2Tokens.trust_region else mean >= threshold
    rejected = torch.zeros_like(pooled)
    rejected[order] = high  # the running mean of rising values never falls
    return rejected


def m2_mean(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    tokens: M2Tokens = M2Tokens.trust_region,
) -> float:
    """Mean of (log w)^2 over the pool, before anything is dropped; 0 for an empty pool."""
    log_w = log_difference(proximal_logprobs, behavior_logprobs).detach().double()
    if tokens is M2Tokens.trust_region:
        log_w = log_w[log_w * advantages > 0]
    return float(log_w.square().mean()) if log_w.numel() else 0.0
