"""The `broadcast` transport: an update group per cell, one broadcast per bucket.

A bucket that was announced is always finished, whatever has failed by then: an engine that waits
for one comes free only by the bytes, or by the end of our sockets. Whether an engine has its
weights is for the engine to say, not for the collective: it raises when any rank is lost, and the
others may have received everything.

Joining and sending are calls that may never return (a rank of nccl that nobody waits for any more),
so each runs in a thread that is left behind, its group aborted, when its deadline has passed, when
every engine of the cell has failed, or when the trainer stops.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from async_grpo.config.weights import Backend, WeightsSection
from async_grpo.errors import WeightSyncError
from async_grpo.interfaces import Clock
from async_grpo.replay_parts import Cell, CellPhase, Rendezvous, WeightFiles
from async_grpo.weights.background import in_background
from async_grpo.weights.cells import CellOrder
from async_grpo.weights.group import UpdateGroup, join_group, listen
from async_grpo.weights.snapshot import COPY, Snapshot

logger = logging.getLogger(__name__)

CellKey = tuple[tuple[str, int, int], ...]
"""(engine_id, rank_offset, tp_size) of each engine: a group is good for exactly these"""


_NOTICE_S = 0.5
"""Between two looks at the engines of a cell that takes long."""


@dataclass(slots=True)
class _LiveGroup:
    """A process group and the rendezvous that made it."""

    group: UpdateGroup
    rendezvous: Rendezvous
    store: TCPStore
    """ours, for the group's life"""


class BroadcastTransport:
    """Groups of cells, kept from publish to publish. `deliver` may run in several threads.

    Args:
        settings: section `weights`.
        device: where snapshots lie when they are sent; a card for nccl.
        join: makes our end of a group.
        clock: seconds.
    """

    def __init__(
        self,
        settings: WeightsSection,
        device: torch.device,
        *,
        join: Callable[..., UpdateGroup] = join_group,
        clock: Clock = time.monotonic,
    ) -> None:
        self._settings, self._join, self._clock = settings, join, clock
        # auto: whoever knows the engines has not chosen (`backend.settings_in_force`)
        self._backend = Backend.gloo if settings.backend is Backend.auto else settings.backend
        self._device = device if device.type == "cuda" else None
        self._groups: dict[CellKey, _LiveGroup] = {}
        self._lock = threading.Lock()

    def prepare(self, snapshot: Snapshot) -> WeightFiles | None:
        """Nothing: no files."""
        return None

    def keep_only(self, cells: list[Cell]) -> None:
        """Leave groups of cells that are no more, as of engines that were restarted."""
        for key in set(self._groups) - {_key(cell) for cell in cells}:
            self._forget(key)

    def deliver(self, order: CellOrder, snapshot: Snapshot) -> None:
        """Meet the engines of a cell and send every bucket.

        Raises:
            WeightSyncError: they did not meet, and nothing was sent.
        """
        key = _key(order.cell)
        try:
            live = self._meet(order, key)
        except WeightSyncError as error:
            self._forget(key)
            order.abort(str(error))
            raise
        failure = self._send(order, live.group, snapshot)
        if failure is not None:
            logger.warning("cell %d (%s): %s", order.cell.cell_id, order.peers, failure)
            self._forget(key)

    def failed(self, cell: Cell) -> None:
        """An engine of the cell is not where it should be: the next update meets anew."""
        self._forget(_key(cell))

    def settled(self) -> None:
        """Groups stay for the next publish."""

    def close(self) -> None:
        """Leave all groups."""
        self.keep_only([])

    def _send(
        self, order: CellOrder, group: UpdateGroup, snapshot: Snapshot
    ) -> WeightSyncError | None:
        """Every bucket; the first failure."""
        order.enter("bucket 0")
        sending = in_background(
            lambda: self._send_all(order, group, snapshot), name=f"send-{order.cell.cell_id}"
        )
        try:
            self._watch(order, sending, lambda: order.failed(all_of_them=True))
        except WeightSyncError as error:
            group.abort()
            return error
        except BaseException:  # the trainer stops
            group.abort()
            raise
        return sending.result()

    def _send_all(
        self, order: CellOrder, group: UpdateGroup, snapshot: Snapshot
    ) -> WeightSyncError | None:
        """In a thread that may be left behind. After a failure, the rest has one more deadline."""
        failure: WeightSyncError | None = None
        deadline = 0.0
        timeout_s = self._settings.timeout_s
        with snapshot.lent():
            for index in range(len(snapshot.buckets)):
                if failure is not None and self._clock() > deadline:
                    break
                try:
                    self._send_one(order, group, snapshot, index)
                except WeightSyncError as error:
                    if error.phase == COPY:  # there are no bytes to send
                        return failure or error
                    if failure is None:
                        failure, deadline = error, self._clock() + timeout_s
                    if group.closed or self._device is not None:
                        break  # nccl: what has failed once carries nothing more
        return failure

    def _send_one(
        self, order: CellOrder, group: UpdateGroup, snapshot: Snapshot, index: int
    ) -> None:
        timeout_s = self._settings.timeout_s
        order.enter(COPY)
        if self._device is None:
            payload, copied = snapshot.whole_bucket(index, timeout_s), None
        else:
            payload, copied = snapshot.bucket(index, timeout_s)
        order.enter(f"bucket {index}")
        group.broadcast(payload, ready=copied)

    def _watch(self, order: CellOrder, work: Future[Any], given_up: Callable[[], str]) -> None:
        """Wait for the end of `work`, whatever it is.

        Raises:
            WeightSyncError: it is given up, or its phase should have ended long ago.
        """
        while not wait([work], timeout=_NOTICE_S).done:
            if reason := given_up() or order.overdue():
                raise order.error(reason)

    def _meet(self, order: CellOrder, key: CellKey) -> _LiveGroup:
        """The cell's process group, with all of its engines ready to receive."""
        self._close_overlapping(key)
        live = self._groups.get(key)
        if live is not None:
            order.open(live.rendezvous)
            order.require(CellPhase.BEGUN)
            return live
        live = self._meet_anew(order)
        with self._lock:
            self._groups[key] = live
        return live

    def _meet_anew(self, order: CellOrder) -> _LiveGroup:
        """A fresh group; given up as soon as an engine says that it will not come.

        Our own rank is a client of our store like every other. So all of them come free when the
        store goes, instead of waiting for their deadlines.
        """
        settings = self._settings
        store, port = listen(settings.host)
        name = f"async-grpo-{order.sequence}-{order.cell.cell_id}-{secrets.token_hex(4)}"
        world_size = 1 + sum(engine.tp_size for engine in order.cell.engines)
        order.open(self._rendezvous(name, port, world_size, fresh=True))
        order.require(CellPhase.BEGUN)
        order.enter("join")
        joining = in_background(
            lambda: self._join(
                host=settings.host,
                port=port,
                rank=0,
                world_size=world_size,
                group_name=name,
                backend=self._backend.value,
                timeout_s=settings.timeout_s,
                device=self._device,
            ),
            name=f"join-{order.cell.cell_id}",
        )
        try:
            self._watch(order, joining, order.failed)
        except BaseException:  # also when the trainer stops
            del store
            joining.add_done_callback(_abort_what_came)
            raise
        try:
            group = joining.result()
        except WeightSyncError as error:
            raise order.error(order.failed() or str(error)) from error
        return _LiveGroup(group, self._rendezvous(name, port, world_size, fresh=False), store)

    def _rendezvous(self, name: str, port: int, world_size: int, *, fresh: bool) -> Rendezvous:
        return Rendezvous(
            group_name=name,
            host=self._settings.host,
            port=port,
            world_size=world_size,
            backend=self._backend.value,
            fresh=fresh,
        )

    def _close_overlapping(self, key: CellKey) -> None:
        """Forget groups of other cells with one of these engines: the engine leaves them now."""
        engines = {engine_id for engine_id, _, _ in key}
        with self._lock:
            stale = [
                other
                for other in self._groups
                if other != key and engines & {engine_id for engine_id, _, _ in other}
            ]
        for other in stale:
            self._forget(other)

    def _forget(self, key: CellKey) -> None:
        with self._lock:
            live = self._groups.pop(key, None)
        if live is not None:
            live.group.close()


def _abort_what_came(joining: Future[UpdateGroup]) -> None:
    """A group that nobody waits for any more."""
    if joining.exception() is None:
        joining.result().abort()


def _key(cell: Cell) -> CellKey:
    return tuple(sorted((e.engine_id, e.rank_offset, e.tp_size) for e in cell.engines))
