"""Stands in for SGLang's native kernels, which need CUDA or, on a CPU, AMX.

SGLang's CPU branches import names from here at import time. What the plain decoding path calls is
written in torch; anything else raises when it is called, so a model that needs a kernel says which.

It registers no `torch.ops.sgl_kernel`: SGLang looks there for AMX kernels, and their absence sends
every layer down its torch path.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.4.10"
"""Of the release that SGLang 0.5.23 asks for."""


def refusing(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """`__getattr__` for `module`: any name is a function that raises NotImplementedError."""

    def getattr_(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):  # asked for by the import system
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{module}.{name} has no stand-in on this CPU")

        missing.__name__ = name
        return missing

    return getattr_


__getattr__ = refusing(__name__)


def assign_req_to_token_pool_cpu(
    request_indices: torch.Tensor,
    request_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    cache_locations: torch.Tensor,
    _pool_length: int,
) -> None:
    """Write each request's new cache locations into its row, in place.

    Args:
        request_indices: [num_requests] rows.
        request_to_token: [num_rows, pool_length], changed.
        starts: [num_requests] first column of each.
        ends: [num_requests] column after the last.
        cache_locations: [sum of (end - start)] values, request after request.
    """
    taken = 0
    rows = zip(request_indices.tolist(), starts.tolist(), ends.tolist(), strict=True)
    for row, start, end in rows:
        values = cache_locations[taken : taken + end - start]
        request_to_token[row, start:end] = values.to(request_to_token.dtype)
        taken += end - start
