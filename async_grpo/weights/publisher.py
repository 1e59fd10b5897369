"""Trainer rank 0's end of weight sync: snapshot, announce, deliver to each cell.

`publish` announces and sends from a worker thread, which serves each cell in a thread of its own,
while the caller's thread copies the weights; then the trainer steps on. The snapshot is kept: an
engine that wishes for the current weights gets them again without the trainer. Costs one copy of
the weights; for a moment two, after a broadcast that had to be left behind.

Every wait for a cell has the deadline `weights.timeout_s`, phase by phase. The worker's and the
cells' threads are daemons whose end is waited for no longer than that, so that nothing which hangs
below them can keep the trainer.

Knows nothing of train steps, nor of how weights travel (`broadcast`, `disk`, `http_source`). Which
engines form a cell, and whether they took the weights, is the replay server's to say.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from async_grpo.config.weights import Backend, Transport, WeightsSection
from async_grpo.errors import AsyncGrpoError, PeerError, WeightSyncError
from async_grpo.interfaces import Clock, PublishReplay, WeightSource
from async_grpo.replay_api.publishing import AnnounceReply
from async_grpo.replay_parts import Cell, CellPhase, UpdateReport, WeightFiles
from async_grpo.types import WeightsName
from async_grpo.weights.addresses import require_own_address
from async_grpo.weights.arrival import disagreements
from async_grpo.weights.background import in_background
from async_grpo.weights.broadcast import BroadcastTransport
from async_grpo.weights.cells import Call, CellOrder
from async_grpo.weights.disk import DiskTransport
from async_grpo.weights.flatten import digests, dtype_name, empty_buckets
from async_grpo.weights.group import UpdateGroup, join_group
from async_grpo.weights.http_source import HttpTransport
from async_grpo.weights.plan import BucketPlan, TensorSpec, make_plan
from async_grpo.weights.publish_result import PublishResult
from async_grpo.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_NOTICE_S = 0.5
"""Between two looks at a cell that takes long."""
_PREPARE_TRIES = 4
"""Of writing the files of one publish: a disk may be full or gone for a moment."""


class WeightTransport(Protocol):
    """How weights travel. `deliver` and `failed` are called from several threads."""

    def prepare(self, snapshot: Snapshot) -> WeightFiles | None:
        """Before the announcement; the files to announce, if they travel as such."""
        ...

    def keep_only(self, cells: list[Cell]) -> None:
        """These are the cells of a publish to all: forget what was kept for others."""
        ...

    def deliver(self, order: CellOrder, snapshot: Snapshot) -> None:
        """Bring the weights to one cell. Raises WeightSyncError if nothing was sent."""
        ...

    def failed(self, cell: Cell) -> None:
        """Not every engine of the cell has committed."""
        ...

    def settled(self) -> None:
        """Every engine of the announcement has committed or failed."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class WeightPublisher:
    """Sends weights to engines. `publish`, `republish` and `close` are for one thread each.

    Args:
        replay: the server.
        call: runs its coroutines.
        settings: section `weights`.
        run_directory: where `weights.directory` is by default.
        device: that the weights lie on.
        clock: seconds.
        join: makes our end of an update group.

    Raises:
        ConfigError: `weights.directory` is in use, or `weights.host` is no address of ours.
    """

    def __init__(
        self,
        replay: PublishReplay,
        call: Call,
        settings: WeightsSection,
        *,
        run_directory: Path,
        device: torch.device = _CPU,
        clock: Clock = time.monotonic,
        join: Callable[..., UpdateGroup] = join_group,
    ) -> None:
        self._replay, self._call, self._settings, self._clock = replay, call, settings, clock
        self._source = device if device.type == "cuda" else None
        over_nccl = (
            settings.backend is Backend.nccl and Transport.broadcast in settings.transports()
        )
        self._held_on = device if over_nccl else _CPU
        make: dict[Transport, Callable[[], WeightTransport]] = {
            Transport.broadcast: lambda: BroadcastTransport(settings, self._held_on, join=join),
            Transport.disk: lambda: DiskTransport(
                Path(settings.directory or run_directory / "weights"), settings.timeout_s
            ),
            Transport.http: lambda: HttpTransport(call, settings.host, settings.timeout_s),
        }
        if settings.transports() != {Transport.disk}:
            require_own_address("weights.host", settings.host)
        self._transports = {kind: make[kind]() for kind in settings.transports()}
        self._job: Future[PublishResult] | None = None
        self._job_lock = threading.Lock()
        self._closed = threading.Event()
        self._orders: list[CellOrder] = []
        """of the announcement under way, those that are not served yet"""
        self._number = 0
        self._plan: BucketPlan | None = None
        self._snapshot: Snapshot | None = None
        self._failures_in_a_row = 0
        self._not_before = 0.0
        self._last: PublishResult | None = None

    @property
    def last_result(self) -> PublishResult | None:
        """Of the newest finished announcement."""
        return self._last

    def publish(self, weights: WeightsName, source: WeightSource) -> None:
        """Send `source` to all engines in the background; returns when its weights are copied.

        Waits first for the announcement before, which each phase's `weights.timeout_s` bounds.

        Raises:
            PeerError: the replay server failed the announcement before.
            WeightSyncError: its files could not be written, or a cell was not served in time.
            ValueError: a tensor has another dtype or shape than at the first publish.
        """
        with self._job_lock:
            self._finish_job()
            tensors = dict(source.named_tensors())
            self._snapshot = self._empty_snapshot(weights, tensors, source)
            self._start(self._snapshot, wished_only=False)
            self._snapshot.fill(tensors)

    def republish(self) -> bool:
        """Send the latest snapshot to the engines that wish for it; never blocks.

        Returns:
            Whether an announcement was started: not while another runs, before the first
            `publish`, or within the back-off after a failure.

        Raises:
            PeerError: the replay server failed the announcement before.
            WeightSyncError: its files could not be written.
        """
        if not self._job_lock.acquire(blocking=False):
            return False  # a publish is being prepared; it serves everyone
        try:
            if self._job is None or not self._job.done() or self._snapshot is None:
                return False
            self._finish_job()
            if self._clock() < self._not_before:
                return False
            self._start(self._snapshot, wished_only=True)
            return True
        finally:
            self._job_lock.release()

    def wait(self) -> None:
        """Until the announcement under way is over.

        Raises:
            PeerError: the replay server failed it.
            WeightSyncError: its files could not be written, or a cell was not served in time.
        """
        with self._job_lock:
            self._finish_job()

    def close(self) -> None:
        """Free the transports. Waits for the announcement under way, as `publish` does."""
        self._closed.set()
        try:
            self._finish_job()
        except (AsyncGrpoError, CancelledError) as error:  # told to whoever published before
            logger.debug("the last announcement failed: %s", error)
        for transport in self._transports.values():
            transport.close()

    def _start(self, snapshot: Snapshot, *, wished_only: bool) -> None:
        self._job = in_background(
            lambda: self._run(snapshot, wished_only=wished_only), name="publish"
        )

    def _finish_job(self) -> None:
        """Wait for the announcement under way, but not for a cell that nobody can end."""
        if self._job is None:
            return
        while not wait([self._job], timeout=_NOTICE_S).done:
            for order in tuple(self._orders):
                if reason := order.stuck():
                    raise order.error(reason)
        self._job.result()

    def _empty_snapshot(
        self, weights: WeightsName, tensors: dict[str, Tensor], source: WeightSource
    ) -> Snapshot:
        if self._plan is None:
            specs = [TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()]
            self._plan = make_plan(specs, self._settings.bucket_bytes)
        before = self._snapshot
        if before is not None and before.is_lent:
            logger.warning(
                "a broadcast that was left behind still reads %s: %s get memory of their own",
                before.weights, weights,
            )  # fmt: skip
        if before is not None and not before.is_lent:
            buckets = before.buckets  # nobody sends them any more: overwrite
        else:
            pinned = self._source is not None and self._held_on is _CPU
            buckets = empty_buckets(self._plan, self._held_on, pinned=pinned)
        # beside the probe's forward pass
        hashing = in_background(lambda: digests(tensors), name="digests")
        probe = source.probe()
        return Snapshot(weights, self._plan, probe, hashing.result(), buckets, source=self._source)

    def _run(self, snapshot: Snapshot, *, wished_only: bool) -> PublishResult:
        """One announcement, on the worker thread."""
        started = self._clock()
        self._number += 1
        settings = self._settings
        kind = (settings.late_transport if wished_only else None) or settings.transport
        transport = self._transports[kind]
        files = self._prepare(transport, snapshot)
        reply = self._call(
            self._replay.announce(
                self._number,
                snapshot.weights,
                wished_only=wished_only,
                plan_hash=snapshot.plan.plan_hash,
                buckets=[] if files is not None else snapshot.plan.specs(),
                probe=snapshot.probe,
                digests=snapshot.digests,
                files=files,
            )
        )
        if not wished_only:
            transport.keep_only(reply.cells)
        outcomes = self._serve_all(transport, reply, snapshot)
        transport.settled()
        self._last = self._result(snapshot, outcomes, self._clock() - started)
        failures = self._last.failures
        self._note(failures)
        logger.log(
            logging.WARNING if failures else logging.DEBUG,
            "weights %s announced as %d to %d cell(s) in %.3f s%s",
            snapshot.weights, reply.publish_sequence, len(outcomes), self._last.seconds,
            "".join(f"; {line}" for line in failures),
        )  # fmt: skip
        return self._last

    def _result(
        self, snapshot: Snapshot, outcomes: list["_Outcome"], seconds: float
    ) -> PublishResult:
        reports = {k: v for outcome in outcomes for k, v in outcome.reports.items()}
        engines = [engine for outcome in outcomes for engine in outcome.cell.engines]
        alarms = [line for report in reports.values() for line in report.alarms]
        alarms += disagreements(
            {engine_id: report.checksum for engine_id, report in reports.items()},
            {engine.engine_id: engine.tp_size for engine in engines},
        )
        for line in alarms:
            logger.warning("weights %s: %s", snapshot.weights, line)
        failures = [outcome.failure for outcome in outcomes if outcome.failure]
        return PublishResult(
            snapshot.weights, len(outcomes), failures, seconds, list(reports.values()), alarms
        )

    def _prepare(self, transport: WeightTransport, snapshot: Snapshot) -> WeightFiles | None:
        """The files, tried more than once.

        Raises:
            WeightSyncError: of the last try.
        """
        backoff_s = _FIRST_BACKOFF_S
        for left in reversed(range(_PREPARE_TRIES)):
            try:
                return transport.prepare(snapshot)
            except WeightSyncError as error:
                if not left or self._closed.is_set():
                    raise
                logger.warning("%s; trying again in %.1f s", error, backoff_s)
            self._closed.wait(backoff_s)
            backoff_s *= 4
        raise AssertionError("the last try returns or raises")

    def _note(self, failures: list[str]) -> None:
        """Back off after a failure; the next success forgets it."""
        self._failures_in_a_row = self._failures_in_a_row + 1 if failures else 0
        if failures:
            delay = _FIRST_BACKOFF_S * 2 ** min(self._failures_in_a_row - 1, 16)
            self._not_before = self._clock() + min(delay, _MAX_BACKOFF_S)

    def _serve_all(
        self, transport: WeightTransport, announced: AnnounceReply, snapshot: Snapshot
    ) -> list["_Outcome"]:
        """Every cell, at the same time."""
        self._orders = [
            CellOrder(
                self._replay, self._call, announced.publish_sequence, cell, snapshot.weights,
                self._settings.timeout_s,
            )
            for cell in announced.cells
        ]  # fmt: skip
        jobs = [
            in_background(
                partial(self._serve, transport, order, snapshot), name=f"cell-{order.cell.cell_id}"
            )
            for order in tuple(self._orders)
        ]
        return [job.result() for job in jobs]

    def _serve(
        self, transport: WeightTransport, order: CellOrder, snapshot: Snapshot
    ) -> "_Outcome":
        """All of one cell. Each engine is judged by what it says, whatever the transport met."""
        try:
            transport.deliver(order, snapshot)
            return _Outcome(order.cell, "", order.require(CellPhase.COMMITTED))
        except (WeightSyncError, PeerError) as error:
            transport.failed(order.cell)
            return _Outcome(order.cell, str(error), {})
        finally:
            self._orders.remove(order)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How one cell fared."""

    cell: Cell
    failure: str
    reports: dict[str, UpdateReport]
