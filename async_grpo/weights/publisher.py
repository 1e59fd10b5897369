"""Trainer rank 0's end of weight sync: snapshot, announce, broadcast to each cell.

`publish` copies the weights and returns; a worker thread then announces them and serves each cell
in a thread of its own, so the trainer steps on meanwhile. The snapshot is kept: an engine that
wishes for the current weights gets them again without the trainer. Costs one copy of the weights.

Knows nothing of train steps. Which engines form a cell, and whether they took the weights, is the
replay server's to say.
"""

import logging
import secrets
import threading
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from async_grpo.config.weights import Backend, WeightsSection
from async_grpo.errors import PeerError, WeightSyncError
from async_grpo.interfaces import Clock, TrainerReplay, WeightSource
from async_grpo.replay_parts import Cell, CellPhase, Probe, Rendezvous
from async_grpo.types import WeightsName
from async_grpo.weights.flatten import dtype_name, flatten
from async_grpo.weights.group import UpdateGroup, join_group, listen
from async_grpo.weights.plan import BucketPlan, TensorSpec, make_plan

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0


class Call(Protocol):
    """Runs a coroutine of `TrainerReplay` on its event loop and blocks for the result."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """The result; raises what the coroutine raises."""
        ...


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Weights as they are sent; not changed until the next publish."""

    weights: WeightsName
    buckets: list[Tensor]
    """uint8, one per bucket"""
    probe: Probe


@dataclass(slots=True)
class _LiveGroup:
    """A process group and the rendezvous that made it."""

    group: UpdateGroup
    rendezvous: Rendezvous


_CellKey = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class PublishResult:
    """What became of one announcement."""

    weights: WeightsName
    num_cells: int
    failures: list[str]
    """one line per cell that did not commit as a whole"""
    seconds: float


class WeightPublisher:
    """Sends weights to engines. `publish`, `republish` and `close` are for one thread each."""

    def __init__(
        self,
        replay: TrainerReplay,
        call: Call,
        settings: WeightsSection,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._replay, self._call, self._settings, self._clock = replay, call, settings, clock
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._job: Future[PublishResult] | None = None
        self._job_lock = threading.Lock()
        self._number = 0
        self._plan: BucketPlan | None = None
        self._snapshot: _Snapshot | None = None
        self._groups: dict[_CellKey, _LiveGroup] = {}
        self._groups_lock = threading.Lock()
        self._failures_in_a_row = 0
        self._not_before = 0.0
        self._last: PublishResult | None = None

    @property
    def last_result(self) -> PublishResult | None:
        """Of the newest finished announcement."""
        return self._last

    def publish(self, weights: WeightsName, source: WeightSource) -> None:
        """Snapshot `source` and send it to all engines in the background.

        Waits first for the announcement before, which each phase's `weights.timeout_s` bounds.

        Raises:
            PeerError: the replay server failed the announcement before.
        """
        with self._job_lock:
            self._finish_job()
            self._snapshot = self._copy(weights, source)
            self._job = self._worker.submit(self._run, self._snapshot, wished_only=False)

    def republish(self) -> bool:
        """Send the latest snapshot to the engines that wish for it; never blocks.

        Returns:
            Whether an announcement was started: not while another runs, before the first
            `publish`, or within the back-off after a failure.

        Raises:
            PeerError: the replay server failed the announcement before.
        """
        if not self._job_lock.acquire(blocking=False):
            return False  # a publish is being prepared; it serves everyone
        try:
            if self._job is None or not self._job.done() or self._snapshot is None:
                return False
            self._finish_job()
            if self._clock() < self._not_before:
                return False
            self._job = self._worker.submit(self._run, self._snapshot, wished_only=True)
            return True
        finally:
            self._job_lock.release()

    def wait(self) -> None:
        """Until the announcement under way is over.

        Raises:
            PeerError: the replay server failed it.
        """
        with self._job_lock:
            self._finish_job()

    def close(self) -> None:
        """End the worker and leave all groups. Waits for the announcement under way."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        for live in self._groups.values():
            live.group.close()
        self._groups.clear()

    def _finish_job(self) -> None:
        if self._job is not None:
            self._job.result()

    def _copy(self, weights: WeightsName, source: WeightSource) -> _Snapshot:
        tensors = dict(source.named_tensors())
        if self._plan is None:
            specs = [TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()]
            self._plan = make_plan(specs, self._settings.bucket_bytes)
        reusable = self._snapshot.buckets if self._snapshot is not None else None
        buckets = flatten(self._plan, tensors, device=self._device(tensors.values()), into=reusable)
        return _Snapshot(weights, buckets, source.probe())

    def _device(self, tensors: Iterable[Tensor]) -> torch.device:
        if self._backend == Backend.nccl.value:
            return next(iter(tensors)).device
        return torch.device("cpu")

    @property
    def _backend(self) -> str:
        """Gloo unless asked for: an embedded engine may share our GPU, where nccl refuses."""
        backend = self._settings.backend
        return Backend.gloo.value if backend is Backend.auto else backend.value

    def _run(self, snapshot: _Snapshot, *, wished_only: bool) -> PublishResult:
        """One announcement, on the worker thread."""
        assert self._plan is not None
        started = self._clock()
        self._number += 1
        reply = self._call(
            self._replay.announce(
                self._number,
                snapshot.weights,
                wished_only=wished_only,
                plan_hash=self._plan.plan_hash,
                buckets=self._plan.specs(),
                probe=snapshot.probe,
            )
        )
        failures: list[str] = []
        if not wished_only:
            self._keep_only({_key(cell) for cell in reply.cells})
        if reply.cells:
            with ThreadPoolExecutor(len(reply.cells), thread_name_prefix="cell") as pool:
                jobs = [
                    pool.submit(self._serve, reply.publish_sequence, cell, snapshot)
                    for cell in reply.cells
                ]
            failures = [line for job in jobs if (line := job.result())]
        self._note(failures)
        seconds = self._clock() - started
        self._last = PublishResult(snapshot.weights, len(reply.cells), failures, seconds)
        level = logging.WARNING if failures else logging.DEBUG
        logger.log(
            level,
            "weights %s announced as %d to %d cell(s) in %.3f s%s",
            snapshot.weights,
            reply.publish_sequence,
            len(reply.cells),
            seconds,
            "".join(f"; {line}" for line in failures),
        )
        return self._last

    def _note(self, failures: list[str]) -> None:
        """Back off after a failure; the next success forgets it."""
        self._failures_in_a_row = self._failures_in_a_row + 1 if failures else 0
        if failures:
            delay = _FIRST_BACKOFF_S * 2 ** min(self._failures_in_a_row - 1, 16)
            self._not_before = self._clock() + min(delay, _MAX_BACKOFF_S)

    def _serve(self, sequence: int, cell: Cell, snapshot: _Snapshot) -> str:
        """All of one cell; returns what went wrong, or an empty string."""
        key = _key(cell)
        try:
            try:
                live = self._meet(sequence, cell, key, str(snapshot.weights))
                for bucket in snapshot.buckets:
                    live.group.broadcast(bucket)
            except WeightSyncError as error:
                self._forget(key)
                self._call(self._replay.abort_cell(sequence, cell.cell_id, str(error)))
                return str(error)
            self._require(CellPhase.COMMITTED, sequence, cell, str(snapshot.weights))
        except (WeightSyncError, PeerError) as error:
            self._forget(key)
            return str(error)
        return ""

    def _meet(self, sequence: int, cell: Cell, key: _CellKey, weights: str) -> _LiveGroup:
        """The cell's process group, with all of its engines ready to receive."""
        self._close_overlapping(key)
        live = self._groups.get(key)
        if live is not None:
            self._call(self._replay.open_cell(sequence, cell.cell_id, live.rendezvous))
            self._require(CellPhase.BEGUN, sequence, cell, weights)
            return live
        store, port = listen(self._settings.host)
        rendezvous = Rendezvous(
            group_name=f"async-grpo-{sequence}-{cell.cell_id}-{secrets.token_hex(4)}",
            host=self._settings.host,
            port=port,
            world_size=1 + sum(engine.tp_size for engine in cell.engines),
            backend=self._backend,
            fresh=True,
        )
        self._call(self._replay.open_cell(sequence, cell.cell_id, rendezvous))
        self._require(CellPhase.BEGUN, sequence, cell, weights)
        group = join_group(
            host=rendezvous.host,
            port=port,
            rank=0,
            world_size=rendezvous.world_size,
            group_name=rendezvous.group_name,
            backend=rendezvous.backend,
            timeout_s=self._settings.timeout_s,
            store=store,
        )
        live = _LiveGroup(group, _again(rendezvous))
        with self._groups_lock:
            self._groups[key] = live
        return live

    def _require(self, phase: CellPhase, sequence: int, cell: Cell, weights: str) -> None:
        """Wait until every engine of the cell is at `phase`.

        Raises:
            WeightSyncError: one failed, or is not there at the deadline; names them.
        """
        order = list(CellPhase)
        reply = self._call(
            self._replay.wait_cell(
                sequence, cell.cell_id, phase, timeout_s=self._settings.timeout_s
            )
        )
        missing = []
        for engine in cell.engines:
            reached = reply.phases.get(engine.engine_id, CellPhase.ANNOUNCED)
            if reached is CellPhase.FAILED or order.index(reached) < order.index(phase):
                detail = reply.details.get(engine.engine_id, "")
                missing.append(f"{engine.engine_id} is {reached.value}{detail and f': {detail}'}")
        if missing:
            peers = ", ".join(engine.engine_id for engine in cell.engines)
            raise WeightSyncError(peers, weights, phase.value, "; ".join(missing))

    def _close_overlapping(self, key: _CellKey) -> None:
        """Forget groups of other cells with one of these engines: the engine leaves them now."""
        engines = {engine_id for engine_id, _, _ in key}
        with self._groups_lock:
            stale = [
                other
                for other in self._groups
                if other != key and engines & {engine_id for engine_id, _, _ in other}
            ]
        for other in stale:
            self._forget(other)

    def _keep_only(self, keys: set[_CellKey]) -> None:
        """Forget groups of cells that are no more, as of engines that were restarted."""
        for key in set(self._groups) - keys:
            self._forget(key)

    def _forget(self, key: _CellKey) -> None:
        with self._groups_lock:
            live = self._groups.pop(key, None)
        if live is not None:
            live.group.close()


def _key(cell: Cell) -> _CellKey:
    return tuple(sorted((e.engine_id, e.rank_offset, e.tp_size) for e in cell.engines))


def _again(rendezvous: Rendezvous) -> Rendezvous:
    return Rendezvous(
        group_name=rendezvous.group_name,
        host=rendezvous.host,
        port=rendezvous.port,
        world_size=rendezvous.world_size,
        backend=rendezvous.backend,
        fresh=False,
    )
