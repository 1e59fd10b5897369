"""A language model's head in float32: logits of low-precision models that are not rounded.

Logits around 16 are 0.0625 apart in bfloat16; their error goes into the log-prob as it is. Products
of two bfloat16 numbers are exact in float32, so only the order of the sum is left to differ.

Shapes: n = rows, H = hidden size, V = vocabulary.
"""

from functools import partial

import torch
from torch import Tensor, nn

_SLICE = 8192
"""Rows of the head whose gradient is added at a time where each product makes a new tensor."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """float32 or better: a log-sum-exp in bfloat16 is unstable."""
    return torch.promote_types(dtype, torch.float32)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Hidden @ weight.T in float32 or better, without rounding on the way.

    Args:
        hidden: [..., H].
        weight: [V, H], of the same dtype.

    Returns:
        [..., V]
    """
    dtype = accumulator(hidden.dtype)
    if hidden.dtype != dtype and _multiplies_into_float32(hidden.device):
        flat = torch.mm(hidden.flatten(0, -2), weight.T, out_dtype=dtype)
        return flat.view(*hidden.shape[:-1], weight.shape[0])
    return hidden.to(dtype) @ weight.to(dtype).T


def hidden_gradient(of_logits: Tensor, weight: Tensor) -> Tensor:
    """of_logits @ weight, [n, H] of the dtype of `weight`.

    Args:
        of_logits: [n, V], of the accumulator's dtype; rounded to the dtype of `weight` first where
            the device multiplies such numbers fast.
        weight: [V, H].
    """
    if weight.dtype == of_logits.dtype or _multiplies_into_float32(weight.device):
        return of_logits.to(weight.dtype) @ weight
    return (of_logits @ weight.to(of_logits.dtype)).to(weight.dtype)


def add_weight_gradient(into: Tensor, of_logits: Tensor, hidden: Tensor) -> None:
    """Into += of_logits.T @ hidden, summed in float32 or better.

    Where the device multiplies low-precision numbers into float32, the gradient of the logits is
    rounded to the dtype of `hidden` first: float32 products are 8 times slower there or more.

    Args:
        into: [V, H], of the accumulator's dtype.
        of_logits: [n, V], of the accumulator's dtype.
        hidden: [n, H].
    """
    if hidden.dtype == into.dtype or not _multiplies_into_float32(hidden.device):
        into.addmm_(of_logits.T, hidden.to(into.dtype))
        return
    rounded = of_logits.to(hidden.dtype)
    for start in range(0, into.shape[0], _SLICE):
        part = slice(start, start + _SLICE)
        into[part] += torch.mm(rounded[:, part].T, hidden, out_dtype=into.dtype)


def use_float32_logits(head: nn.Linear) -> None:
    """Let `head` itself answer with logits in float32; its weight stays as it is."""
    head.forward = partial(_forward, head)  # type: ignore[method-assign]  # of this one only


def _forward(head: nn.Linear, hidden: Tensor) -> Tensor:
    found = logits(hidden, head.weight)
    return found if head.bias is None else found + head.bias


def _multiplies_into_float32(device: torch.device) -> bool:
    """Whether torch.mm has `out_dtype` there: CUDA does, the CPU of torch 2.13 does not."""
    if not hasattr(torch.ops.aten.mm, "dtype"):
        return False
    key = device.type.upper()
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", key))
