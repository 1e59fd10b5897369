"""The scripted engine in a process of its own, with real weights in real gloo groups, to be killed.

    engine = await GlooProcess.start()
    engine.plan(Path.UPDATE_FROM_DISTRIBUTED, Mishap.DIE_BEFORE, skip=1)     # at the second bucket

Its "log-probs" are a function of the checksum of its weights, so a probe passes exactly when every
byte has arrived. Processes are forked off a server that has imported torch once.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any, Self

import msgspec
import torch
from aiohttp import web
from torch import nn
from torch.distributed.distributed_c10d import _world

from async_grpo.engine.admission import RequestRefused
from async_grpo.engine.model_thread import ModelThread
from async_grpo.engine.weight_loader import WeightLoader
from async_grpo.engine_api import (
    DestroyGroupRequest,
    InitGroupRequest,
    Path,
    ServerInfo,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
)
from tests.fakes.fake_engine import FakeEngine, Fault

SHAPES = {"a": (1 << 19,), "b": (1 << 9, 1 << 10)}
"""Two tensors of 2 MiB, more than sockets hold: a broadcast cannot end before it is received."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.fakes.gloo_engine"])


class Mishap(StrEnum):
    """What happens at one call, besides what `Fault` can do."""

    DIE_BEFORE = "die_before"
    """the process is killed when the call arrives"""
    DIE_DURING = "die_during"
    """... while a bucket is arriving"""
    DIE_AFTER = "die_after"
    """... when the work is done, before the answer"""
    FREEZE = "freeze"
    """the process is stopped when the call arrives, and answers nothing"""
    WRONG_SHAPE = "wrong_shape"
    """the engine's tensor has another shape than the trainer's"""


def module_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module with these parameters."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def checksum_of(tensors: dict[str, torch.Tensor]) -> str:
    """As an engine with these weights gives it."""
    return WeightLoader(module_of(tensors), torch.device("cpu"), 1.0).checksum()


def process_facts() -> dict[str, Any]:
    """What would grow if something leaked."""
    gc.collect()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "torch_groups": len(_world.pg_map) + len(_world.pg_names) + len(_world.pg_group_ranks),
        "torch_tags": sum(len(groups) for groups in _world.tags_to_pg.values()),
    }


class GlooEngine(FakeEngine):
    """`FakeEngine`, but buckets are received and weights are held."""

    def __init__(self, *, tp_size: int, timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._tp_size = tp_size
        # forked before there are threads
        self._ranks = [_Rank(rank, timeout_s) for rank in range(1, tp_size)]
        self._loader = _loader(timeout_s)
        self._thread = ModelThread()
        self._mishaps: dict[Path, deque[str | None]] = {}
        self._dies_during = False

    def plan(self, path: Path, mishap: str, skip: int) -> None:
        if mishap in ("wrong_shape", "right_shape"):
            shape = (3,) if mishap == "wrong_shape" else SHAPES["b"]
            self._loader._parameters["b"].data = torch.zeros(shape)
        else:
            self._mishaps[path] = deque([*[None] * skip, mishap])

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
        if self._dies_during:
            self._loader._buffer = torch.full((1 << 22,), 255, dtype=torch.uint8)
            threading.Thread(target=_die_when_bytes_arrive, args=(self._loader,)).start()
        await self._on_all_ranks("load", request)
        await super().update(request)
        self.loaded = await self.checksum()

    async def update_from_disk(self, request: UpdateFromDiskRequest) -> int:
        if self.session_open:
            raise RequestRefused("a weight update is open")
        files = await self._thread.run(self._loader.open_directory, request.model_path)
        await self._thread.run(self._loader.load_directory, files)
        self.weight_version = request.weight_version or "unversioned"
        self.loaded = await self.checksum()
        return len(self.running)

    async def checksum(self) -> str:
        return await self._thread.run(self._loader.checksum)

    async def _on_all_ranks(self, method: str, request: Any) -> None:
        others = [asyncio.to_thread(rank.call, method, request) for rank in self._ranks]
        results = await asyncio.gather(
            self._thread.run(getattr(self._loader, method), request),
            *others,
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    @web.middleware
    async def _observe(self, http: web.Request, handler: Any) -> web.StreamResponse:
        planned = self._mishaps.get(Path(http.path))
        if http.path == Path.GENERATE and b'"probe-' not in await http.read():
            planned = None  # of requests, only the probe is a phase of an update
        mishap = planned.popleft() if planned else None
        if mishap == Mishap.DIE_BEFORE:
            await http.read()
            os.kill(os.getpid(), signal.SIGKILL)
        if mishap == Mishap.FREEZE:
            await http.read()
            os.kill(os.getpid(), signal.SIGSTOP)
        self._dies_during = mishap == Mishap.DIE_DURING
        if mishap in set(Fault):
            self.fail_next(Path(http.path), Fault(mishap))
        response = await super()._observe(http, handler)
        if mishap == Mishap.DIE_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return response


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
    return WeightLoader(module_of(zeros), torch.device("cpu"), timeout_s)


def _die_when_bytes_arrive(loader: WeightLoader) -> None:
    while int(loader._buffer[0]) == 255:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def _main(pipe: Connection, port: int, options: dict[str, Any]) -> None:
    """The engine's process, until the pipe closes."""
    asyncio.run(_serve(GlooEngine(**options), pipe, port))


async def _serve(engine: GlooEngine, pipe: Connection, port: int) -> None:
    pipe.send(await engine.start(port=port))
    closed = asyncio.Event()

    def command() -> None:
        try:
            name, args = pipe.recv()
        except EOFError:
            closed.set()
            return
        if name == "plan":
            engine.plan(*args)
            pipe.send(None)
        else:
            pipe.send(process_facts() | {"groups": sorted(engine.groups)})

    asyncio.get_running_loop().add_reader(pipe.fileno(), command)
    await closed.wait()
    os._exit(0)  # a thread may be stuck in a collective


class GlooProcess:
    """The test's hands on one such process; also its `EngineHandle`."""

    def __init__(self, *, owned: bool) -> None:
        self.owned = owned
        self.url = ""
        self._pipe, theirs = _context.Pipe()
        self._theirs = theirs
        self._ended = asyncio.Event()

    @classmethod
    async def start(
        cls, *, owned: bool, port: int = 0, tp_size: int = 1, timeout_s: float = 10.0
    ) -> Self:
        """A process that listens."""
        self = cls(owned=owned)
        options = {"tp_size": tp_size, "timeout_s": timeout_s}
        self._process = _context.Process(target=_main, args=(self._theirs, port, options))
        await asyncio.to_thread(self._process.start)
        self._theirs.close()
        self.url = await asyncio.to_thread(self._pipe.recv)
        loop, sentinel = asyncio.get_running_loop(), self._process.sentinel

        def has_ended() -> None:
            loop.remove_reader(sentinel)
            self._ended.set()

        loop.add_reader(sentinel, has_ended)
        return self

    @property
    def port(self) -> int:
        """That it listens on."""
        return int(self.url.rsplit(":", 1)[1])

    @property
    def alive(self) -> bool:
        """Not killed; it may be frozen."""
        return self._process.is_alive()

    def plan(self, path: Path, mishap: str, *, skip: int = 0) -> None:
        """The call of `path` after the next `skip` ones goes wrong."""
        self._ask("plan", (path, mishap, skip))

    def facts(self) -> dict[str, Any]:
        """Of the engine's process."""
        return self._ask("facts", ())

    async def frozen(self) -> None:
        """Wait until it has stopped; only the kernel knows."""
        await asyncio.to_thread(_until_stopped, self._process.pid, 20.0)

    def thaw(self) -> None:
        """Go on after a freeze."""
        os.kill(self._process.pid, signal.SIGCONT)

    def _ask(self, name: str, args: tuple[Any, ...]) -> Any:
        self._pipe.send((name, args))
        return self._pipe.recv()

    def destroy(self) -> None:
        """End the process, whoever owns it."""
        self._process.kill()
        self._process.join(10)
        self._pipe.close()

    def free(self) -> None:
        """Close what was kept to learn of its end."""
        self.destroy()
        self._process.close()

    async def wait(self) -> str:
        await self._ended.wait()
        return "the process ended"

    async def kill(self) -> None:
        if self.owned:
            await asyncio.to_thread(self.destroy)

    async def terminate(self) -> None:
        await self.kill()


def _until_stopped(pid: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "T":
                return
        os.sched_yield()
    raise TimeoutError(f"process {pid} did not stop within {timeout_s:g} s")
