"""Named tensors -> the plan's flat uint8 buckets."""

from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from async_grpo.weights.plan import BucketPlan, TensorSpec

_DIGEST_WORDS = 1 << 22
"""At a time, which takes 64 MiB."""
_DIGEST_SEED = 4


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


@torch.no_grad()
def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Numbers of 64 bits that tell whether the bytes of a tensor are what they were.

    To be compared within one process. As fast as memory: on a CPU a hash; elsewhere a sum on the
    device of the tensor's 32-bit words, each times a random odd number of its place, so that a
    change that only moves bits about is seen. All sums are read at once, since each reading waits
    for what the device has to do before. No proof against an adversary.

    Args:
        tensors: name -> values, all on one device.
    """
    device = next(iter(tensors.values())).device
    values = [as_words(tensor.detach()) for tensor in tensors.values()]
    if device.type == "cpu":
        hashes = [xxhash.xxh3_64_intdigest(words.numpy().data) - (1 << 63) for words in values]
        return dict(zip(tensors, hashes, strict=True))
    return dict(zip(tensors, sums_of_words(values, device), strict=True))


def as_words(tensor: Tensor) -> Tensor:
    """Its bytes as int32, filled up with zeros."""
    flat = tensor.reshape(-1).view(torch.uint8)
    if odd := flat.numel() % 4:
        flat = torch.cat([flat, flat.new_zeros(4 - odd)])
    return (flat.clone() if flat.storage_offset() % 4 else flat).view(torch.int32)


def sums_of_words(values: Sequence[Tensor], device: torch.device) -> list[int]:
    """Of each [n] int32, modulo 2^64."""
    factors = _factors(device)
    sums = []
    for words in values:
        total = factors.new_zeros(())
        for number, start in enumerate(range(0, len(words), _DIGEST_WORDS)):
            part = words[start : start + _DIGEST_WORDS]
            total += (2 * number + 1) * (part * factors[: len(part)]).sum()
        sums.append(total)
    return [int(value) for value in torch.stack(sums).tolist()]


def _factors(device: torch.device) -> Tensor:
    """[_DIGEST_WORDS] int64, odd."""
    generator = torch.Generator().manual_seed(_DIGEST_SEED)
    whole = torch.randint(-(1 << 62), 1 << 62, (_DIGEST_WORDS,), generator=generator)
    return (2 * whole + 1).to(device)
