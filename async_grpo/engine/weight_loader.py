"""Receive weights, or read them from a disk, and copy them into the model in place.

Parameters and persistent buffers, by the names of `weights.tensor_list`.

An update is checked whole before anything is copied, so a refused one leaves the weights as they
were. What is broadcast is received first all the same: the sender is already broadcasting, and
nothing else would free it. Knows nothing of requests, pauses or sessions. Model thread only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from async_grpo.engine.admission import RequestRefused
from async_grpo.engine.checkpoint_files import CheckpointFiles
from async_grpo.engine_api import (
    FLATTENED_BUCKET,
    NOT_RECEIVED,
    Checksums,
    DestroyGroupRequest,
    InitGroupRequest,
    UpdateFromDistributedRequest,
)
from async_grpo.errors import WeightSyncError
from async_grpo.weights.group import UpdateGroup, join_group
from async_grpo.weights.tensor_list import known_tensors, travelling_tensors

_DTYPES = {
    name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")
}  # as SGLang spells them


class WeightLoader:
    """The model's tensors and the update groups that fill them."""

    def __init__(self, module: Any, device: torch.device, timeout_s: float) -> None:
        # Tied tensors appear under each of their names; copying twice is harmless.
        self._tensors: dict[str, torch.Tensor] = known_tensors(module)
        self._required = travelling_tensors(module)
        self._computed = {name for name, _ in module.named_buffers()} - self._tensors.keys()
        """buffers that no state dict has; a file may have been made when they were in it"""
        self._device = device
        self._timeout_s = timeout_s
        self._groups: dict[str, tuple[UpdateGroup, torch.device]] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def init_group(self, request: InitGroupRequest) -> None:
        """Join; blocks until all ranks have met.

        Raises:
            RequestRefused: the name is in use, or not all ranks came before the deadline.
        """
        if request.group_name in self._groups:
            raise RequestRefused(f"update group {request.group_name!r} exists")
        if request.backend not in ("gloo", "nccl"):
            raise RequestRefused(f"backend {request.backend!r} is not supported")
        device = self._device if request.backend == "nccl" else torch.device("cpu")
        try:
            group = join_group(
                host=request.master_address,
                port=request.master_port,
                rank=request.rank_offset,
                world_size=request.world_size,
                group_name=request.group_name,
                backend=request.backend,
                timeout_s=self._timeout_s,
                device=device if request.backend == "nccl" else None,
            )
        except WeightSyncError as error:
            raise RequestRefused(str(error)) from error
        self._groups[request.group_name] = (group, device)

    def destroy_group(self, request: DestroyGroupRequest) -> None:
        """Leave.

        Raises:
            RequestRefused: there is no such group.
        """
        if (entry := self._groups.pop(request.group_name, None)) is None:
            raise RequestRefused(f"there is no update group {request.group_name!r}")
        entry[0].close()

    def load(self, request: UpdateFromDistributedRequest) -> None:
        """Receive tensors, as one bucket or one by one, and copy them into the model.

        Raises:
            RequestRefused: nothing was copied; the message says why.
        """
        sizes = _sizes(request)
        if request.group_name not in self._groups:
            raise RequestRefused(f"there is no update group {request.group_name!r}")
        if request.load_format == FLATTENED_BUCKET:
            payload = self._receive_bucket(request.group_name, sum(sizes))
            self._check(request)
            pieces = torch.split(payload, sizes)
            tensors = [
                piece.view(_DTYPES[dtype]).view(shape)
                for piece, dtype, shape in zip(pieces, request.dtypes, request.shapes, strict=True)
            ]
        else:
            tensors = self._receive_each(request)
            self._check(request)
        with torch.no_grad():
            for name, tensor in zip(request.names, tensors, strict=True):
                self._tensors[name].copy_(tensor)

    def open_directory(self, path: str) -> CheckpointFiles:
        """The weights in a directory of safetensors, checked against the model but not yet read.

        Raises:
            RequestRefused: files are missing or damaged, or hold another model.
        """
        files = CheckpointFiles(Path(path), ignored=self._computed)
        problems = files.mismatches({name: tuple(t.shape) for name, t in self._tensors.items()})
        present = {self._tensors[name].data_ptr() for name in files.names if name in self._tensors}
        problems += [
            f"{name} is missing"
            for name, tensor in self._required.items()
            if tensor.data_ptr() not in present
        ]
        if problems:
            raise RequestRefused(f"{path} does not fit the model: " + "; ".join(problems))
        return files

    def load_directory(self, files: CheckpointFiles) -> None:
        """Copy them into the model, each in the dtype of the model's tensor.

        Raises:
            RequestRefused: reading failed; the weights may be mixed then.
        """
        with torch.no_grad():
            for name, tensor in files.tensors():
                self._tensors[name].copy_(tensor)

    def checksums(self) -> Checksums:
        """Hashes over name, shape and bytes of each tensor, tied ones once. No cryptography."""
        tensors = {}
        for name, tensor in sorted(self._required.items()):
            digest = xxhash.xxh3_64()  # as fast as memory: requests are paused meanwhile
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            digest.update(flat.cpu().numpy().data)
            tensors[name] = digest.hexdigest()
        total = xxhash.xxh3_128_hexdigest(" ".join(tensors.values()).encode())
        return Checksums(total=total, tensors=tensors)

    def close(self) -> None:
        """Leave all groups."""
        for group, _ in self._groups.values():
            group.close()
        self._groups.clear()

    def _receive_bucket(self, group_name: str, num_bytes: int) -> torch.Tensor:
        group, device = self._groups[group_name]
        if self._buffer.numel() < num_bytes or self._buffer.device != device:
            self._buffer = _room([num_bytes], torch.uint8, device)
        payload = self._buffer[:num_bytes]
        _receive(group, [payload])
        return payload

    def _receive_each(self, request: UpdateFromDistributedRequest) -> list[torch.Tensor]:
        group, device = self._groups[request.group_name]
        tensors = [
            _room(shape, _DTYPES[dtype], device)
            for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
        ]
        _receive(group, tensors)
        return tensors

    def _check(self, request: UpdateFromDistributedRequest) -> None:
        problems = []
        offset = 0
        for name, dtype, shape in zip(request.names, request.dtypes, request.shapes, strict=True):
            own = self._tensors.get(name)
            if own is None:
                problems.append(f"the model has no tensor {name!r}")
                continue
            if _DTYPES[dtype] != own.dtype:
                problems.append(f"{name} is {own.dtype}, not {dtype}")
            if list(own.shape) != shape:
                problems.append(f"{name} has shape {list(own.shape)}, not {shape}")
            if request.load_format == FLATTENED_BUCKET and offset % own.dtype.itemsize:
                problems.append(f"{name}: Unaligned received tensor at byte {offset}")
            offset += _num_bytes(dtype, shape)
        if problems:
            raise RequestRefused("nothing was loaded: " + "; ".join(problems))


def _room(shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for what is to come.

    Raises:
        RequestRefused: there is none. The sender then waits for us in vain, until it is told.
    """
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # CUDA has a subclass for it, the CPU has not
        reason = str(error).strip().partition("\n")[0]
        raise RequestRefused(f"{NOT_RECEIVED}: no memory for a bucket: {reason}") from error


def _receive(group: UpdateGroup, tensors: Sequence[torch.Tensor]) -> None:
    try:
        for tensor in tensors:
            group.broadcast(tensor)
    except WeightSyncError as error:
        raise RequestRefused(f"{NOT_RECEIVED}: {error}") from error


def _sizes(request: UpdateFromDistributedRequest) -> list[int]:
    """Bytes of each tensor.

    Raises:
        RequestRefused: before anything is received: the request does not even say how much.
    """
    if request.load_format not in (None, FLATTENED_BUCKET):
        raise RequestRefused(
            f"load_format {request.load_format!r} is not supported; use {FLATTENED_BUCKET!r} or "
            "null"
        )
    if not len(request.names) == len(request.dtypes) == len(request.shapes):
        raise RequestRefused("names, dtypes and shapes differ in length")
    if unknown := sorted(set(request.dtypes) - set(_DTYPES)):
        raise RequestRefused(f"unknown dtypes: {unknown}")
    pairs = zip(request.dtypes, request.shapes, strict=True)
    return [_num_bytes(dtype, shape) for dtype, shape in pairs]


def _num_bytes(dtype: str, shape: list[int]) -> int:
    num_elements = 1
    for size in shape:
        num_elements *= size
    return num_elements * int(_DTYPES[dtype].itemsize)
