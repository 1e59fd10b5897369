"""Whole distributions over a vocabulary: what a sampler's log-probs are of, and entropy.

The train step never holds such tensors; this is for small vocabularies, checks and tests.
"""

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """-sum pi log pi in nats, over the last dimension, with gradient.

    d entropy / d logits = -pi * (log pi + entropy).
    """
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def sampling_logprobs(logits: Tensor, *, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """Log-probs of what a sampler draws from: log_softmax(logits / T), then nucleus filtering.

    A trainer must divide logits, never log-probs, by the temperature. With top_p < 1 the kept
    tokens (mass before them in descending order < top_p) are renormalized and the others are -inf;
    training refuses such samplers, since the trainer scores the full distribution.

    Args:
        logits: [..., V].
        temperature: > 0.
        top_p: in (0, 1].
    """
    logprobs = (logits / temperature).log_softmax(-1)
    if top_p >= 1:
        return logprobs
    ordered, order = logprobs.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, before < top_p)
    return logprobs.masked_fill(~kept, -torch.inf).log_softmax(-1)
