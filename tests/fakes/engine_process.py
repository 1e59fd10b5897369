"""An engine in a process of its own, to be killed, frozen or made to refuse at a chosen call.

    process = await EngineProcess.start(partial(embedded_engine, timeout_s=10.0), owned=True)
    process.plan(Path.UPDATE_FROM_DISTRIBUTED, Mishap.DIE_BEFORE, skip=1)     # at the second bucket

Which engine that is, the embedded one (`embedded_engine`) or a scripted one (`gloo_engine`), makes
no difference here: mishaps happen before its routes, or in its weight loader, and both are real.
Processes are forked off a server that has imported torch and the engines once.
"""

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
from aiohttp import web
from torch.distributed.distributed_c10d import _world

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.engine.backend import EngineBackend
from async_grpo.engine.routes import make_app
from async_grpo.engine.weight_loader import WeightLoader
from async_grpo.engine_api import Path

_context = multiprocessing.get_context("forkserver")
_preloaded: list[str] = []
_LARGEST_BUCKET_BYTES = 1 << 23


class Mishap(StrEnum):
    """What happens at one call."""

    REFUSE = "refuse"
    """400 with success false; a bucket is received first, as by an engine that it does not fit"""
    LOSE_SESSION = "lose_session"
    """somebody else ends the update session: buckets are refused before they are received"""
    HANG = "hang"
    """the call is not answered until the client gives up; others are"""
    DIE_BEFORE = "die_before"
    """the process is killed when the call arrives"""
    DIE_DURING = "die_during"
    """... while a bucket is arriving"""
    DIE_AFTER = "die_after"
    """... when the work is done, before the answer"""
    FREEZE = "freeze"
    """the process is stopped when the call arrives, and answers nothing"""
    NEVER_RETURN = "never_return"
    """the engine enters the broadcast and never leaves it, deadline or not, as over nccl when a
    rank does not come; its other calls are answered unless they need the model"""
    NO_MEMORY = "no_memory"
    """there is none for the bucket: the engine says so, and never enters the broadcast"""
    WRONG_SHAPE = "wrong_shape"
    """from now on the engine's tensor, one of the last bucket, has another shape than the
    trainer's"""
    RIGHT_SHAPE = "right_shape"
    """... no longer"""


@dataclass(frozen=True)
class ServedEngine:
    """What a process serves."""

    backend: EngineBackend
    loader: WeightLoader
    """of the backend"""
    died: asyncio.Event
    """it will never decode again, and the process ends, as the product's does"""


BuildEngine = Callable[[], ServedEngine]
"""Called on the event loop of the process, before it has threads; can be pickled."""


def preload(module: str) -> None:
    """Import it once, in the server that engine processes are forked from."""
    _preloaded.append(module)
    _context.set_forkserver_preload(_preloaded)


def process_facts() -> dict[str, Any]:
    """What would grow if something leaked."""
    gc.collect()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "torch_groups": len(_world.pg_map) + len(_world.pg_names) + len(_world.pg_group_ranks),
        "torch_tags": sum(len(groups) for groups in _world.tags_to_pg.values()),
    }


class Mishaps:
    """Those that are planned, and the middleware at which they happen."""

    def __init__(self, served: ServedEngine) -> None:
        self._backend, self._loader = served.backend, served.loader
        self._planned: dict[Path, deque[Mishap | None]] = {}
        self._received = False
        """an update has ended its session, and requests do not go on yet"""
        self._last_sent = max(self._loader._tensors)  # buckets are filled in this order
        self._fitting = self._loader._tensors[self._last_sent]

    def plan(self, path: Path, mishap: Mishap, skip: int) -> None:
        """The call of `path` after the next `skip` ones goes wrong."""
        if mishap is Mishap.WRONG_SHAPE:
            wrong = torch.zeros(len(self._fitting) + 1)
            self._loader._tensors[self._last_sent] = torch.nn.Parameter(wrong)
        elif mishap is Mishap.RIGHT_SHAPE:
            self._loader._tensors[self._last_sent] = self._fitting
        else:
            self._planned[path] = deque([*[None] * skip, mishap])

    @web.middleware
    async def listen(self, http: web.Request, handler: Any) -> web.StreamResponse:
        """Before the routes."""
        body = await http.read()
        planned = self._planned.get(Path(http.path))
        if http.path == Path.GENERATE and b'"probe-' not in body:
            planned = None  # of requests, only the probe is a phase of an update
        if http.path in (Path.END_UPDATE, Path.CONTINUE):
            self._received = http.path == Path.END_UPDATE
        if http.path == Path.MODEL_INFO and not self._received:
            planned = None  # the slot looks at the name now and then
        mishap = planned.popleft() if planned else None
        if mishap is Mishap.REFUSE and http.path == Path.UPDATE_FROM_DISTRIBUTED:
            return await self._refuse_what_came(http, handler)
        if mishap is Mishap.REFUSE:
            return web.json_response({"success": False, "message": "on purpose"}, status=400)
        if mishap is Mishap.LOSE_SESSION:
            await self._backend.end_update()
        if mishap is Mishap.HANG:
            await asyncio.Event().wait()
        if mishap is Mishap.DIE_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        if mishap is Mishap.FREEZE:
            os.kill(os.getpid(), signal.SIGSTOP)
        if mishap is Mishap.DIE_DURING:
            self._die_at_the_first_bytes()
        if mishap is Mishap.NEVER_RETURN:
            for group, _ in self._loader._groups.values():
                group.broadcast = lambda _: threading.Event().wait()  # type: ignore[method-assign]
        if mishap is Mishap.NO_MEMORY:
            self._run_out_of_memory()
        response = await handler(http)
        if mishap is Mishap.DIE_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return response

    async def _refuse_what_came(self, http: web.Request, handler: Any) -> web.StreamResponse:
        """By the engine itself: it knows no such tensors."""
        known, self._loader._tensors = self._loader._tensors, {}
        try:
            return await handler(http)
        finally:
            self._loader._tensors = known

    def _run_out_of_memory(self) -> None:
        """When the next bucket's buffer is made; as a card does, the CPU overcommits."""
        self._loader._buffer = torch.empty(0, dtype=torch.uint8)
        empty = torch.empty

        def once(*args: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
            if dtype is not torch.uint8:
                return empty(*args, dtype=dtype, **options)
            torch.empty = empty
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.")

        torch.empty = once

    def _die_at_the_first_bytes(self) -> None:
        """Of the bucket that comes next: it is received into a buffer that is watched."""
        self._loader._buffer = torch.full((_LARGEST_BUCKET_BYTES,), 255, dtype=torch.uint8)
        first = self._loader._buffer.numpy()[:4].view("int32")

        def watch() -> None:
            while first[0] == -1:  # no weight has these bytes: they are a NaN
                pass
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()


def _main(pipe: Connection, port: int, build: BuildEngine) -> None:
    """The engine's process, until the pipe closes or the engine dies."""
    asyncio.run(_serve(pipe, port, build))


async def _serve(pipe: Connection, port: int, build: BuildEngine) -> None:
    served = build()
    mishaps = Mishaps(served)
    app = make_app(served.backend, EngineKeys())
    app.middlewares.append(mishaps.listen)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
    ended = served.died

    def command() -> None:
        try:
            name, args = pipe.recv()
        except EOFError:
            ended.set()
            return
        if name == "plan":
            mishaps.plan(*args)
            pipe.send(None)
        else:
            pipe.send(process_facts() | {"groups": sorted(served.loader._groups)})

    asyncio.get_running_loop().add_reader(pipe.fileno(), command)
    await ended.wait()
    os._exit(0)  # a thread may be stuck in a collective


class EngineProcess:
    """The test's hands on one such process; also its `EngineHandle`."""

    def __init__(self, *, owned: bool) -> None:
        self.owned = owned
        self.url = ""
        self._pipe, theirs = _context.Pipe()
        self._theirs = theirs
        self._ended = asyncio.Event()

    @classmethod
    async def start(cls, build: BuildEngine, *, owned: bool, port: int = 0) -> Self:
        """A process that listens."""
        self = cls(owned=owned)
        self._process = _context.Process(target=_main, args=(self._theirs, port, build))
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

    def plan(self, path: Path, mishap: Mishap, *, skip: int = 0) -> None:
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
