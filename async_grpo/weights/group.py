"""The process group that carries one cell's weights, built as SGLang builds it.

Trainer rank 0 listens (`listen`) and is rank 0 of the group; every engine rank joins by address.
The group is never the default one: a TCPStore wrapped in PrefixStore(group_name), then torch's
`_new_process_group_helper`, which is what SGLang's `init_custom_process_group` does. A group built
by `init_process_group` or `new_group` uses other store keys, and both sides would hang.

Left alone, gloo tells the other ranks the address of this machine's *name*, which on many machines
is the loopback interface: it is told the one that faces rank 0 instead, unless the user has set
GLOO_SOCKET_IFNAME.

Does not know what the bytes mean. Blocking calls; several groups may be used from several threads,
one thread each.
"""

import logging
import os
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
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from async_grpo.errors import WeightSyncError
from async_grpo.weights.addresses import address_facing, listening_socket

logger = logging.getLogger(__name__)

_LISTEN_TIMEOUT = timedelta(seconds=120)
"""Of the listening store's own requests; it answers itself, so never in practice."""

_GLOO_FACING = "async_grpo_gloo"
"""Our name of gloo at an address that is chosen; on the wire it is gloo."""


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
    """This process's end of one update group."""

    def __init__(self, group: ProcessGroup, store: Store, name: str, timeout_s: float) -> None:
        self.name = name
        self._group: ProcessGroup | None = group
        self._store: Store | None = store
        self._timeout_s = timeout_s

    def broadcast(self, payload: torch.Tensor, src: int = 0) -> None:
        """Send `payload` from rank `src`, or receive it; blocks until done.

        Args:
            payload: contiguous, of one size and dtype on all ranks; on the CPU for gloo, on the
                GPU for nccl.
            src: rank that sends.

        Raises:
            WeightSyncError: the group is closed, a rank is gone, or the deadline has passed. The
                content of a receiver's payload is then undefined.
        """
        if self._group is None:
            raise WeightSyncError(
                f"update group {self.name!r}", "the announced weights", "broadcast", "it is closed"
            )
        try:
            work = dist.broadcast(payload, src, group=self._group, async_op=True)
            assert work is not None, "this rank is not in the group it joined"
            work.wait(timedelta(seconds=self._timeout_s))
            if payload.is_cuda:
                torch.cuda.synchronize(payload.device)  # nccl's wait only orders streams
        except RuntimeError as error:
            raise _failed(self.name, "broadcast", error) from error

    def close(self) -> None:
        """Leave the group and free its sockets. Idempotent; waits for nobody."""
        if self._group is None:
            return
        group, self._group, self._store = self._group, None, None
        try:
            dist.destroy_process_group(group)
        except (RuntimeError, ValueError) as error:
            logger.warning("closing update group %r: %s", self.name, error)


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
) -> UpdateGroup:
    """Meet the other ranks; returns when all have come.

    Args:
        host: where rank 0 listens.
        port: its port.
        rank: of this process; 0 is the sender.
        world_size: 1 + ranks of all engines of the cell.
        group_name: fresh in this process; torch keeps names process-wide.
        backend: gloo or nccl.
        timeout_s: deadline of the rendezvous and of each later collective.
        store: rank 0's own, from `listen`.

    Raises:
        WeightSyncError: not all ranks came in time, or the name is in use.
    """
    timeout = timedelta(seconds=timeout_s)
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
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise _failed(group_name, f"join at {host}:{port}", error) from error
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return UpdateGroup(group, store, group_name, timeout_s)


def _failed(name: str, phase: str, error: Exception) -> WeightSyncError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return WeightSyncError(f"update group {name!r}", "the announced weights", phase, reason)
