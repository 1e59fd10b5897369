"""The process group that carries one cell's weights, built as SGLang builds it.

Trainer rank 0 listens (`listen`) and is rank 0 of the group; every engine rank joins by address.
The group is never the default one: a TCPStore wrapped in PrefixStore(group_name), then torch's
`_new_process_group_helper`, which is what SGLang's `init_custom_process_group` does. A group built
by `init_process_group` or `new_group` uses other store keys, and both sides would hang.

Over gloo, ranks have met when `join_group` returns, and a collective ends at its deadline. Over
nccl SGLang makes its communicator only in its first broadcast, which its generator asks for as soon
as it has joined. Our rank makes its own while it joins (`device_id`): it waits for SGLang's there,
and not in a broadcast. No deadline of torch or NCCL ends that wait, so its caller leaves it behind.

Left alone, gloo tells the other ranks the address of this machine's *name*, which on many machines
is the loopback interface: it is told the one that faces rank 0 instead, unless the user has set
GLOO_SOCKET_IFNAME.

Does not know what the bytes mean. Blocking calls; several groups may be used from several threads,
one thread each.
"""

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    TCPStore,
)
from torch.distributed.distributed_c10d import (
    Backend,
    _abort_process_group,
    _new_process_group_helper,
    _world,
)

from async_grpo.errors import WeightSyncError
from async_grpo.weights.addresses import address_facing, listening_socket
from async_grpo.weights.background import in_background

logger = logging.getLogger(__name__)

_LISTEN_TIMEOUT = timedelta(seconds=120)
"""Of the listening store's own requests; it answers itself, so never in practice."""
_LEAVE_S = 5.0
"""For the end of a group in which nothing is under way; after that it ends in the background."""

_GLOO_FACING = "async_grpo_gloo"
"""Our name of gloo at an address that is chosen; on the wire it is gloo."""

NCCL_DEFAULTS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""Read when a group is made. The first two: a wait blocks until its deadline, aborts and raises,
and no watchdog ends the process because of a lost engine. The others are SGLang's own values, and
both ends should have the same."""
_FORMER_NAMES = {
    "TORCH_NCCL_BLOCKING_WAIT": "NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING",
}
"""That torch still reads."""
_LAST_ERROR = "Last error:"
_STACK = ("Exception raised from", "frame #")
"""How the lines of an error begin that say only where in torch it was raised."""


def _new_gloo(parts: Any, address: str) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch 2.6 has no other
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = parts.timeout
    return ProcessGroupGloo(parts.store, parts.group_rank, parts.group_size, options)


Backend.register_backend(_GLOO_FACING, _new_gloo, extended_api=True, devices=["cpu"])


def listen(host: str) -> tuple[TCPStore, int]:
    """Rank 0's store on a port chosen by the system.

    Args:
        host: address of this machine that the engines can reach; it listens there only.

    Returns:
        The store, to be kept until the group is closed, and its port. The port is open as long as
        the store lives: whoever still waits in the rendezvous when it goes gets an error.

    Raises:
        WeightSyncError: `host` cannot be bound.
    """
    try:
        with listening_socket(host) as listener:
            port = listener.getsockname()[1]
            # Left to itself the store listens on every interface. No worker count: the caller
            # announces the port only after this returns.
            store = TCPStore(
                host, port, None, is_master=True, timeout=_LISTEN_TIMEOUT, wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(
            f"weights.host={host}", "the announced weights", "listen", str(error)
        ) from error
    return store, port


class UpdateGroup:
    """This process's end of one update group.

    Args:
        group: of torch.
        store: kept for the group's life.
        name: for messages.
        timeout_s: deadline of each collective.
        device: the card of the payloads; None: they are on the CPU.
    """

    def __init__(
        self,
        group: ProcessGroup,
        store: Store,
        name: str,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        self.name = name
        self._parts: tuple[ProcessGroup, Store] | None = (group, store)
        self._lock = threading.Lock()
        self._timeout_s, self._device = timeout_s, device
        self._side: torch.cuda.Stream | None = None
        self._busy = self._broken = False

    @property
    def closed(self) -> bool:
        """Whether it was left."""
        return self._parts is None

    def broadcast(
        self, payload: torch.Tensor, src: int = 0, *, ready: torch.cuda.Event | None = None
    ) -> None:
        """Send `payload` from rank `src`, or receive it; blocks until done.

        On a card it runs on a stream of this group alone, so it waits neither for what the caller
        queued besides (a train step, say) nor for other groups, and they do not wait for it.

        Args:
            payload: contiguous, of one size and dtype on all ranks; on the CPU for gloo, on the
                group's device for nccl.
            src: rank that sends.
            ready: on a card: recorded when the payload may be used; None: after everything that is
                queued on the current stream.

        Raises:
            WeightSyncError: the group is closed, a rank is gone, or the deadline has passed. The
                content of a receiver's payload is then undefined.
        """
        parts = self._parts
        if parts is None:
            raise WeightSyncError(
                f"update group {self.name!r}", "the announced weights", "broadcast", "it is closed"
            )
        self._busy = True
        try:
            with self._beside_training(ready):
                work = dist.broadcast(payload, src, group=parts[0], async_op=True)
                assert work is not None, "this rank is not in the group it joined"
                work.wait(timedelta(seconds=self._timeout_s))
            if self._side is not None:
                self._side.synchronize()  # torch's wait only orders streams unless told to block
        except RuntimeError as error:
            self._broken = True
            raise _failed(self.name, "broadcast", error) from error
        finally:
            self._busy = False

    @contextmanager
    def _beside_training(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        if self._device is None:
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        if ready is None:
            ready = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._side):
            self._side.wait_event(ready)
            yield

    def close(self) -> None:
        """Leave the group and free its sockets. Idempotent; waits for no peer.

        A group in which a broadcast failed or is under way is aborted.
        """
        with self._lock:
            parts, self._parts = self._parts, None
        if parts is None:
            return
        aborts = self._broken or self._busy
        waits_s = 0.0 if self._busy else _LEAVE_S
        # The last reference goes in that thread: it waits for gloo's threads, and they for a
        # collective under way, which ends at its deadline.
        leaving = in_background(_Leaving(self.name, parts, aborts), name="leave-group")
        del parts
        wait([leaving], timeout=waits_s)

    def abort(self) -> None:
        """Leave the group, whatever is under way in it. Returns at once.

        Over nccl it ends the kernels, and a thread that is in a broadcast gets an error. Over gloo
        that thread gets it at the broadcast's own deadline.
        """
        self._broken = True
        self.close()


class _Leaving:
    """The end of a group as a call that holds the only reference to it, until it has returned."""

    def __init__(self, name: str, parts: tuple[ProcessGroup, Store], aborts: bool) -> None:
        self._name, self._parts, self._aborts = name, parts, aborts

    def __call__(self) -> None:
        group, _store = self._parts
        del self._parts
        try:
            if self._aborts:
                _abort_process_group(group)
            else:
                dist.destroy_process_group(group)
        except (RuntimeError, ValueError) as error:
            logger.warning("closing update group %r: %s", self._name, error)


def join_group(
    *,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_s: float,
    store: TCPStore | None = None,
    device: torch.device | None = None,
) -> UpdateGroup:
    """Meet the other ranks; returns when all have come.

    Over nccl that may be never: leave the call behind then (`in_background`), and close what it may
    still return.

    Args:
        host: where rank 0 listens.
        port: its port.
        rank: of this process; 0 is the sender.
        world_size: 1 + ranks of all engines of the cell.
        group_name: fresh in this process; torch keeps names process-wide.
        backend: gloo or nccl.
        timeout_s: deadline of the rendezvous and of each later collective.
        store: rank 0's own, from `listen`.
        device: nccl: the card of the payloads.

    Raises:
        WeightSyncError: not all ranks came in time, or the name is in use.
    """
    timeout = timedelta(seconds=timeout_s)
    if backend == Backend.NCCL:
        set_nccl_defaults()
    if device is not None and str(device) == device.type:
        device = torch.device(device.type, torch.cuda.current_device())
    try:
        if store is None:
            store = TCPStore(host, port, world_size, is_master=False, timeout=timeout)
        store.set_timeout(timeout)
        prefixed = PrefixStore(group_name, store)
        address = None
        if backend == Backend.GLOO and not os.environ.get("GLOO_SOCKET_IFNAME"):
            backend, address = _GLOO_FACING, address_facing(host, port)
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            prefixed,
            group_name,  # type: ignore[arg-type]  # a NewType of str that torch 2.6 lacks
            backend_options=address,
            timeout=timeout,
            device_id=device,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise _failed(group_name, f"join at {host}:{port}", error) from error
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return UpdateGroup(group, store, group_name, timeout_s, device)


def set_nccl_defaults() -> None:
    """`NCCL_DEFAULTS`, but for what the user has set. Before the first group of a process."""
    for name, value in NCCL_DEFAULTS.items():
        if _FORMER_NAMES.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)


def _failed(name: str, phase: str, error: Exception) -> WeightSyncError:
    return WeightSyncError(f"update group {name!r}", "the announced weights", phase, _reason(error))


def _reason(error: Exception) -> str:
    """The first line, and what NCCL says of the cause, which is in a later one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    reason = lines[0]
    for index, line in enumerate(lines):
        head, found, rest = line.partition(_LAST_ERROR)
        if found and not head:
            cause = [rest, *lines[index + 1 :]]
            ends = next((i for i, line in enumerate(cause) if line.startswith(_STACK)), None)
            return f"{reason}; last error: {' '.join(cause[:ends]).strip()}"
    return reason
