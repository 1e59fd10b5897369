"""Which tensors travel in which broadcast. Starts without torch; knows no tensor values.

One bucket is one flattened uint8 broadcast: its tensors contiguous, flattened, concatenated
without padding. A receiver views each slice in its dtype, so every offset must be a multiple of
the item size: tensors are ordered by item size, largest first, then by name.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from async_grpo.replay_parts import BucketSpec

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Wire dtypes by their SGLang names."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor, without its values."""

    name: str
    dtype: str
    """a key of `ITEM_BYTES`"""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size on the wire."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets in the order they are sent."""

    buckets: list[list[TensorSpec]]
    plan_hash: str
    """equal iff names, dtypes, shapes, order and bucket borders are"""

    @property
    def num_bytes(self) -> int:
        """Bytes of one publish to one cell."""
        return sum(tensor.num_bytes for bucket in self.buckets for tensor in bucket)

    def specs(self) -> list[BucketSpec]:
        """The plan as it is announced."""
        return [
            BucketSpec(
                names=[tensor.name for tensor in bucket],
                dtypes=[tensor.dtype for tensor in bucket],
                shapes=[list(tensor.shape) for tensor in bucket],
            )
            for bucket in self.buckets
        ]


def make_plan(tensors: Iterable[TensorSpec], bucket_bytes: int) -> BucketPlan:
    """The plan for `tensors`; depends on their set only, not on their order.

    A tensor larger than `bucket_bytes` gets a bucket of its own.

    Raises:
        ValueError: a dtype that cannot travel, a name twice, or no tensors.
    """
    ordered = list(tensors)
    unknown = sorted({tensor.dtype for tensor in ordered} - ITEM_BYTES.keys())
    if unknown:
        raise ValueError(f"dtypes {unknown} cannot be broadcast; known: {sorted(ITEM_BYTES)}")
    if len({tensor.name for tensor in ordered}) != len(ordered):
        raise ValueError("two tensors have the same name")
    if not ordered:
        raise ValueError("there are no tensors to plan for")
    ordered.sort(key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    buckets: list[list[TensorSpec]] = [[]]
    filled = 0
    for tensor in ordered:
        if buckets[-1] and filled + tensor.num_bytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor)
        filled += tensor.num_bytes
    return BucketPlan(buckets, _hash(buckets))


def _hash(buckets: Sequence[Sequence[TensorSpec]]) -> str:
    content = [[(t.name, t.dtype, list(t.shape)) for t in bucket] for bucket in buckets]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
