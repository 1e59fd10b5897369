"""Per-token estimators of KL(policy || reference) from one sampled token. Element-wise.

With x = log pi - log ref (http://joschu.net/blog/kl-approx.html). As a *loss* on on-policy
samples, k1 has no gradient in expectation, k2 has that of KL(pi || ref), k3 that of KL(ref || pi).
"""

from torch import Tensor

from async_grpo.algorithms.importance import log_ratio


def k1(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """X; unbiased, may be negative."""
    return log_ratio(policy_logprobs, reference_logprobs)


def k2(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """X^2 / 2; biased, never negative."""
    return log_ratio(policy_logprobs, reference_logprobs).square() / 2


def k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-x) - 1 + x; unbiased, never negative."""
    x = log_ratio(policy_logprobs, reference_logprobs)
    return (-x).exp() - 1 + x
