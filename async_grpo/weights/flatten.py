"""Named tensors -> the plan's flat uint8 buckets."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from async_grpo.weights.plan import BucketPlan, TensorSpec

_DIGEST_WORDS = 1 << 22


def dtype_name(tensor: Tensor) -> str:
    """SGLang's name of the dtype: `torch.bfloat16` -> `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def empty_buckets(plan: BucketPlan, device: torch.device, *, pinned: bool = False) -> list[Tensor]:
    """Room for the plan's buckets: [num_bytes] uint8 each.

    Args:
        plan: what is to come.
        device: where.
        pinned: on the CPU, in memory that a card writes to by itself, beside its computing.
    """
    return [
        torch.empty(
            sum(t.num_bytes for t in bucket), dtype=torch.uint8, device=device, pin_memory=pinned
        )
        for bucket in plan.buckets
    ]


@torch.no_grad()
def flatten(bucket: Sequence[TensorSpec], tensors: Mapping[str, Tensor], payload: Tensor) -> None:
    """Copy one bucket's tensors into its payload; from a card, only queue that on its stream.

    Args:
        bucket: names, dtypes and shapes, in order.
        tensors: name -> values; at least those of the bucket.
        payload: [num_bytes] uint8.

    Raises:
        ValueError: a tensor is missing or has another dtype or shape than planned.
    """
    offset = 0
    for spec in bucket:
        tensor = tensors.get(spec.name)
        if tensor is None or (dtype_name(tensor), tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise ValueError(f"{spec.name} is not the {spec.dtype} {spec.shape} of the plan")
        target = payload[offset : offset + spec.num_bytes].view(tensor.dtype)
        target.copy_(tensor.detach().reshape(-1), non_blocking=True)
        offset += spec.num_bytes


def digest(payload: Tensor) -> int:
    """A number that changes, but for a chance of 2^-64, when the bytes of a payload do.

    A sum of its 64-bit words: as fast as memory, on any device. No proof against an adversary.
    """
    whole = payload.numel() // 8 * 8
    words = payload[:whole].view(torch.int64)
    # weighted by position, block by block, so that an exchange of two blocks is seen
    total = 0
    for start in range(0, words.numel(), _DIGEST_WORDS):
        number = start // _DIGEST_WORDS
        total += (2 * number + 1) * int(words[start : start + _DIGEST_WORDS].sum())
    return (total + int(payload[whole:].sum()) * 31) % (1 << 64)
