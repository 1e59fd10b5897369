"""Counts what autograd keeps for the backward pass."""

from typing import Any

import torch
from torch import Tensor, nn


class SavedBytes:
    """While it is entered, the storages that autograd saves, each once, without the parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._kept: list[Tensor] = []  # alive, so that no address is used twice
        self._sizes: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self._sizes.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._sizes[storage.data_ptr()] = storage.nbytes()
            self._kept.append(tensor)
        return tensor

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
