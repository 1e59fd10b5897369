"""The scripted engine with real weights in real gloo groups, on one rank or several.

Its "log-probs" are a function of the checksum of its weights, so a probe passes exactly when every
byte has arrived. Served by `engine_process`.
"""

import asyncio
import contextlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from torch import nn

from async_grpo.engine.admission import RequestRefused
from async_grpo.engine.model_thread import ModelThread
from async_grpo.engine.weight_loader import WeightLoader
from async_grpo.engine_api import (
    Checksums,
    DestroyGroupRequest,
    InitGroupRequest,
    ServerInfo,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
)
from tests.fakes.engine_process import ServedEngine, preload
from tests.fakes.fake_engine import FakeEngine

SHAPES = {"a": (1 << 19,), "b": (1 << 9, 1 << 10)}
"""Two tensors of 2 MiB. A machine's sockets may hold one: a broadcast can then end before it is
received (`embedded_engine` has larger ones)."""
preload("tests.fakes.gloo_engine")


def scripted_engine(*, tp_size: int, timeout_s: float) -> ServedEngine:
    """For `EngineProcess.start`."""
    engine = GlooEngine(tp_size=tp_size, timeout_s=timeout_s)
    return ServedEngine(engine, engine.loader, asyncio.Event())


def checksum_of(tensors: dict[str, torch.Tensor]) -> str:
    """As an engine with these weights gives it."""
    return WeightLoader(_module_of(tensors), torch.device("cpu"), 1.0).checksums().total


def _module_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


class GlooEngine(FakeEngine):
    """`FakeEngine`, but buckets are received and weights are held.

    Attributes:
        loader: of the first rank.
    """

    def __init__(self, *, tp_size: int, timeout_s: float) -> None:
        super().__init__()
        self._tp_size = tp_size
        # forked before there are threads
        self._ranks = [_Rank(rank, timeout_s) for rank in range(1, tp_size)]
        self.loader = _loader(timeout_s)
        self._thread = ModelThread()

    def server_info(self) -> ServerInfo:
        return msgspec.structs.replace(super().server_info(), tp_size=self._tp_size)

    async def init_group(self, request: InitGroupRequest) -> None:
        await super().init_group(request)
        try:
            await self._on_all_ranks("init_group", request)
        except RequestRefused:
            self.groups.pop(request.group_name)
            raise

    async def destroy_group(self, request: DestroyGroupRequest) -> None:
        await super().destroy_group(request)
        await self._on_all_ranks("destroy_group", request)

    async def update(self, request: UpdateFromDistributedRequest) -> None:
        if not self.session_open:
            raise RequestRefused("must run between begin_weight_update and end_weight_update")
        await self._on_all_ranks("load", request)
        await super().update(request)
        self.loaded = await self.checksum()

    async def update_from_disk(self, request: UpdateFromDiskRequest) -> int:
        if self.session_open:
            raise RequestRefused("a weight update is open")
        files = await self._thread.run(self.loader.open_directory, request.model_path)
        await self._thread.run(self.loader.load_directory, files)
        self.weight_version = request.weight_version or "unversioned"
        self.loaded = await self.checksum()
        return len(self.running)

    async def checksums(self) -> Checksums:
        return await self._thread.run(self.loader.checksums)

    async def checksum(self) -> str:
        return (await self.checksums()).total

    async def _on_all_ranks(self, method: str, request: Any) -> None:
        others = [asyncio.to_thread(rank.call, method, request) for rank in self._ranks]
        results = await asyncio.gather(
            self._thread.run(getattr(self.loader, method), request),
            *others,
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result


class _Rank:
    """Another tensor-parallel rank: here, a second copy of the same weights."""

    def __init__(self, number: int, timeout_s: float) -> None:
        self._number = number
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        fork.Process(target=_serve_rank, args=(theirs, self._pipe, timeout_s), daemon=True).start()
        theirs.close()

    def call(self, method: str, request: Any) -> None:
        if isinstance(request, InitGroupRequest):
            rank = request.rank_offset + self._number
            request = msgspec.structs.replace(request, rank_offset=rank)
        self._pipe.send((method, request))
        if problem := self._pipe.recv():
            raise RequestRefused(problem)


def _serve_rank(pipe: Connection, parents: Connection, timeout_s: float) -> None:
    parents.close()
    loader = _loader(timeout_s)
    with contextlib.suppress(EOFError):
        while True:
            method, request = pipe.recv()
            try:
                getattr(loader, method)(request)
                pipe.send("")
            except RequestRefused as refused:
                pipe.send(refused.message)


def _loader(timeout_s: float) -> WeightLoader:
    torch.set_num_threads(1)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return WeightLoader(_module_of(zeros), torch.device("cpu"), timeout_s)
