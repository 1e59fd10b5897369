"""Section `policy`: the model that is trained."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class DType(StrEnum):
    """Floating-point type of the policy."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"


@dataclass(kw_only=True)
class PolicySection:
    """The model that is trained."""

    model: str
    """Local directory or Hugging Face name; with `maker`, the directory the maker fills."""
    maker: str = ""
    """`package.module:attribute` called as maker(directory, seed, options) by `async-grpo prepare`
    (and so by `run`) when `model` does not exist yet."""
    maker_options: dict[str, Any] = field(default_factory=dict)
    """Passed to the maker."""
    dtype: DType = DType.float32
    """Of the weights and of the compute, trainer and embedded engine alike."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        if not self.model:
            yield f"{where}.model must name a directory or a Hugging Face model"
        if self.maker and ":" not in self.maker:
            yield f"{where}.maker must be package.module:attribute, got {self.maker!r}"
