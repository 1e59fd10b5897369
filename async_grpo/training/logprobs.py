"""Log-probs of chosen tokens from hidden states, without ever holding the full logits.

Knows nothing of policies or batches. Shapes: N = rows, H = hidden size, V = vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from async_grpo.algorithms.head import accumulator, add_weight_gradient, hidden_gradient, logits


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: Tensor, fp32: bool) -> Tensor:
    """[n, V] logits / temperature, of the accumulator's dtype."""
    found = logits(hidden, weight) if fp32 else (hidden @ weight.T).to(accumulator(hidden.dtype))
    return found.div_(temperature)


def _chunk_gradient(
    logprobs: Tensor,
    targets: Tensor,
    entropy: Tensor,
    of_chosen: Tensor | None,
    of_entropy: Tensor | None,
) -> Tensor:
    """Gradient [n, V] of logits / temperature, from those of chosen log-probs and entropies [n, 1].

    d chosen = one-hot - pi; d entropy = -pi * (log pi + entropy). Overwrites `logprobs` [n, V].
    """
    grad_entropy = None
    if of_entropy is not None:
        grad_entropy = (logprobs + entropy).mul_(logprobs.exp()).mul_(-of_entropy)
    if of_chosen is None:
        return torch.zeros_like(logprobs) if grad_entropy is None else grad_entropy
    grad = logprobs.exp_().neg_()
    grad.scatter_add_(-1, targets, torch.ones_like(targets, dtype=grad.dtype))
    grad *= of_chosen
    return grad if grad_entropy is None else grad.add_(grad_entropy)


class _ChosenLogprobs(torch.autograd.Function):
    """Keeps only the log-sum-exp of each row; the backward makes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        chunk: int,
        fp32: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulator(hidden.dtype)
        rows = hidden.shape[0]
        logprobs, entropy, lse = (
            torch.empty(rows, dtype=dtype, device=hidden.device) for _ in range(3)
        )
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            scaled = _scaled_logits(hidden[part], weight, temperature[part, None], fp32)
            lse[part] = scaled.logsumexp(-1)
            chosen = scaled.gather(-1, targets[part, None]).squeeze(-1)
            logprobs[part] = chosen - lse[part]
            probabilities = (scaled - lse[part, None]).exp_()
            entropy[part] = lse[part] - (probabilities * scaled).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperature, lse, entropy)
        ctx.chunk, ctx.fp32 = chunk, fp32
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, temperature, lse, entropy = ctx.saved_tensors
        dtype = accumulator(hidden.dtype)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            scale = temperature[part, None]
            every = _scaled_logits(hidden[part], weight, scale, ctx.fp32).sub_(lse[part, None])
            grad = _chunk_gradient(
                every,
                targets[part, None],
                entropy[part, None],
                None if of_logprobs is None else of_logprobs[part, None],
                None if of_entropy is None else of_entropy[part, None],
            ).div_(scale)
            if grad_hidden is not None:
                grad_hidden[part] = hidden_gradient(grad, weight)
            if grad_weight is not None:
                add_weight_gradient(grad_weight, grad, hidden[part])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    chunk_tokens: int,
    fp32_head: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and the entropy of their distributions, at `temperature`.

    log_softmax(hidden @ weight.T / temperature): the temperature is inside the softmax, as the
    sampler's is. Peak memory is two chunks of logits and one gradient of the head.

    Args:
        hidden: [N, H], last hidden states.
        weight: [V, H], the head.
        targets: [N] int64.
        temperature: [N], of the accumulation dtype (float32 or better), > 0.
        chunk_tokens: rows whose logits are made at a time.
        fp32_head: False: round logits to the dtype of `hidden`, as a plain linear layer does.

    Returns:
        log-probs [N] and entropy [N] in nats, both with gradient to hidden and weight (one that
        nothing uses costs nothing); float32, or float64 for float64 input.
    """
    result: tuple[Tensor, Tensor] = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's apply has no types
        hidden, weight, targets, temperature, chunk_tokens, fp32_head
    )
    return result
