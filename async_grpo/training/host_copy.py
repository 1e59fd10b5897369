"""A copy of named tensors in host memory, laid out as the safetensors files that it will be.

The training thread makes it, in a time that memory or PCIe bounds; a thread that writes reads it
while training goes on. Knows nothing of directories.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from async_grpo.weights.file_set import header
from async_grpo.weights.flatten import dtype_name, flatten
from async_grpo.weights.plan import TensorSpec, make_plan

_BLOCK_BYTES = 1 << 30
"""Of one allocation. Pinned memory is rounded up to a power of two, so many small ones waste it."""


class HostCopy:
    """Memory for one copy of some tensors; pinned where they are on a GPU.

    Kept for the next copy: to get it takes longer than to fill it.
    """

    def __init__(self) -> None:
        self._plan_hash = ""
        self._blocks: list[Tensor] = []

    def take(self, tensors: Mapping[str, Tensor]) -> list[memoryview]:
        """Copy `tensors` over the copy before.

        Returns:
            The pieces of a safetensors file, good until the next call.
        """
        if not tensors:  # of an optimizer before its first update
            return [memoryview(header([]))]
        specs = [TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()]
        plan = make_plan(specs, _BLOCK_BYTES)
        if plan.plan_hash != self._plan_hash:
            self._blocks = []  # free it before there is more
            pinned = any(tensor.is_cuda for tensor in tensors.values())
            self._blocks = [_allocate(bucket, pinned=pinned) for bucket in plan.buckets]
            self._plan_hash = plan.plan_hash
        for bucket, block in zip(plan.buckets, self._blocks, strict=True):
            flatten(bucket, tensors, block)
        in_order = [spec for bucket in plan.buckets for spec in bucket]
        return [memoryview(header(in_order)), *(block.numpy().data for block in self._blocks)]


def _allocate(bucket: list[TensorSpec], *, pinned: bool) -> Tensor:
    num_bytes = sum(spec.num_bytes for spec in bucket)
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
