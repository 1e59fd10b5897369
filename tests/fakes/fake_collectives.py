"""A collective backend and a CUDA without a card, for update groups.

group = fake_group(FakeBackend(fails="NCCL error ..."))
cuda = FakeCuda(monkeypatch)
"""

import threading
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroup
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from async_grpo.weights.group import UpdateGroup

CARD = torch.device("cuda", 0)
_NAME = "async_grpo_fake"
_numbers = count()
_next: list["FakeBackend"] = []


class FakeBackend(ProcessGroup):
    """Says what it is asked for.

    Attributes:
        calls: "broadcast", "abort", "shutdown", in order.
        ended: set by `abort`.
    """

    def __init__(self, *, fails: str = "", hangs: bool = False) -> None:
        super().__init__(0, 2)
        self._fails, self._hangs = fails, hangs
        self.calls: list[str] = []
        self.entered, self.ended = threading.Event(), threading.Event()

    def getBackendName(self) -> str:  # noqa: N802 -- torch's name
        return _NAME

    def broadcast(self, tensors: Any, options: Any) -> Any:
        self.calls.append("broadcast")
        return _Work(self)

    def finish(self) -> None:
        """The end of one collective, as blocking wait of nccl has it."""
        self.entered.set()
        if self._hangs:
            assert self.ended.wait(60), "nobody aborted"
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        if self._fails:
            raise RuntimeError(self._fails)

    def abort(self) -> None:
        self.calls.append("abort")
        self.ended.set()

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class _Work(dist._Work):
    def __init__(self, backend: FakeBackend) -> None:
        super().__init__()
        self._backend = backend

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._backend.finish()
        return True


Backend.register_backend(_NAME, lambda *_: _next.pop(), devices=["cpu"])


def fake_group(
    backend: FakeBackend, *, device: torch.device | None = None, timeout_s: float = 5.0
) -> UpdateGroup:
    """Rank 0 of two."""
    name, store = f"fake-{next(_numbers)}", HashStore()
    _next.append(backend)
    backend._set_group_name(name)
    group, _ = _new_process_group_helper(
        2, 0, [], Backend(_NAME), store, name, timeout=timedelta(seconds=timeout_s)
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    return UpdateGroup(group, store, name, timeout_s, device)


class FakeEvent:
    """Of a stream; it has happened when the test says so."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self.happened = True

    def record(self, stream: "FakeStream") -> None:
        self._cuda.log.append(f"record on {stream.name}")

    def query(self) -> bool:
        return self.happened


class FakeStream:
    """Says what is done with it."""

    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.log.append(f"{self.name} waits for an event")

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._cuda.log.append(f"synchronize {self.name}")


class FakeCuda:
    """`torch.cuda` without a card; a synchronization of the whole device is an error.

    Attributes:
        log: what was done.
    """

    def __init__(self, monkeypatch: Any) -> None:
        self.log: list[str] = []
        self.current = FakeStream(self, "default")
        sides = count()

        def refuse(*_: Any) -> None:
            raise AssertionError("the whole device is synchronized")

        monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream(self, f"side{next(sides)}"))
        monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "synchronize", refuse)

    @contextmanager
    def _stream(self, stream: FakeStream) -> Any:
        before, self.current = self.current, stream
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")
        self.current = before
