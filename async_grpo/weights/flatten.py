"""Named tensors -> the plan's flat uint8 buckets."""

import torch
from torch import Tensor

from async_grpo.weights.plan import BucketPlan


def dtype_name(tensor: Tensor) -> str:
    """SGLang's name of the dtype: `torch.bfloat16` -> `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


@torch.no_grad()
def flatten(
    plan: BucketPlan,
    tensors: dict[str, Tensor],
    *,
    device: torch.device,
    into: list[Tensor] | None = None,
) -> list[Tensor]:
    """The plan's buckets as flat uint8 tensors.

    Args:
        plan: names, dtypes and shapes; must be those of `tensors`.
        tensors: name -> values.
        device: of the buckets.
        into: buckets of an earlier call, to be overwritten instead of making new ones.

    Raises:
        ValueError: a tensor is missing or has another dtype or shape than planned.
    """
    buckets = into or [
        torch.empty(sum(t.num_bytes for t in bucket), dtype=torch.uint8, device=device)
        for bucket in plan.buckets
    ]
    for bucket, payload in zip(plan.buckets, buckets, strict=True):
        offset = 0
        for spec in bucket:
            tensor = tensors.get(spec.name)
            if tensor is None or (dtype_name(tensor), tuple(tensor.shape)) != (
                spec.dtype,
                spec.shape,
            ):
                raise ValueError(f"{spec.name} is not the {spec.dtype} {spec.shape} of the plan")
            target = payload[offset : offset + spec.num_bytes].view(tensor.dtype)
            target.copy_(tensor.detach().reshape(-1))
            offset += spec.num_bytes
    return buckets
