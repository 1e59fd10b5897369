"""Publishes under way: cells, phases of their engines, orders for the generators. Volatile.

After a restart of the server the buckets are gone, so an unfinished publish counts as aborted and
its orders vanish; an engine that got its weights all the same says so in its heartbeat, and one
that did not is behind the newest announcement and is synced again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from async_grpo.replay.core.records import Announced
from async_grpo.replay_parts import (
    BucketSpec,
    Cell,
    CellEngine,
    CellPhase,
    EngineStatus,
    Probe,
    Rendezvous,
    UpdateOrder,
    UpdateReport,
    WeightFiles,
)
from async_grpo.types import WeightsName

_OVER = (CellPhase.COMMITTED, CellPhase.FAILED)


@dataclass(slots=True)
class CellProgress:
    """One cell of a publish."""

    cell: Cell
    phases: dict[str, CellPhase]
    details: dict[str, str] = field(default_factory=dict)
    reports: dict[str, UpdateReport] = field(default_factory=dict)
    rendezvous: Rendezvous | None = None
    go: bool = False
    aborted: str = ""

    @property
    def settled(self) -> bool:
        """Nothing more is expected of it."""
        return bool(self.aborted) or all(phase in _OVER for phase in self.phases.values())

    @property
    def generators(self) -> set[str]:
        """Those that drive its engines."""
        return {engine.generator for engine in self.cell.engines}

    def check_go(self) -> None:
        """The trainer listens and all engines have begun: it stays true from then on."""
        if self.rendezvous is not None and not self.aborted:
            self.go = self.go or all(phase is CellPhase.BEGUN for phase in self.phases.values())

    def advance(
        self, engine_id: str, phase: CellPhase, detail: str, report: UpdateReport | None = None
    ) -> bool:
        """An engine reports; returns whether that is news. A commit is true whenever it comes."""
        known = self.phases.get(engine_id)
        if known is None or known is CellPhase.COMMITTED or known is phase:
            return False
        if known is CellPhase.FAILED and phase is not CellPhase.COMMITTED:
            return False
        if phase is CellPhase.ANNOUNCED:
            return False
        self.phases[engine_id] = phase
        self.details[engine_id] = detail
        if report is not None:
            self.reports[engine_id] = report
        self.check_go()
        return True

    def view(self) -> tuple[dict[str, CellPhase], dict[str, str]]:
        """(phases, details) for the trainer: an aborted cell's other engines have failed."""
        if not self.aborted:
            return dict(self.phases), dict(self.details)
        phases = {
            engine_id: phase if phase is CellPhase.COMMITTED else CellPhase.FAILED
            for engine_id, phase in self.phases.items()
        }
        details = {
            engine_id: self.details.get(engine_id, "") or self.aborted for engine_id in phases
        }
        return phases, details


@dataclass(slots=True)
class Publish:
    """One announcement."""

    record: Announced
    buckets: list[BucketSpec]
    probe: Probe
    digests: dict[str, int]
    files: WeightFiles | None
    cells: dict[int, CellProgress]
    restored: bool = False
    """its buckets went with a restart of the server: generators are shown nothing of it"""

    @property
    def settled(self) -> bool:
        """Every cell is."""
        return all(progress.settled for progress in self.cells.values())

    @property
    def committed(self) -> bool:
        """At least one engine serves the weights."""
        return any(
            phase is CellPhase.COMMITTED
            for progress in self.cells.values()
            for phase in progress.phases.values()
        )

    def awaits(self, known: set[str]) -> bool:
        """Whether an engine that still exists has not reported its end."""
        return any(
            phase not in _OVER and engine_id in known
            for progress in self.cells.values()
            for engine_id, phase in progress.phases.items()
        )

    def abort(self, reason: str) -> None:
        """Give up every cell that is not settled."""
        for progress in self.cells.values():
            if not progress.settled:
                progress.aborted = reason


@dataclass(slots=True)
class PublishingDesk:
    """The newest publish, and earlier ones while an engine still has to learn that they ended."""

    publishes: list[Publish] = field(default_factory=list)

    def announce(
        self,
        record: Announced,
        buckets: list[BucketSpec],
        probe: Probe,
        digests: dict[str, int],
        files: WeightFiles | None,
        known: set[str],
    ) -> None:
        """A publish begins; an unfinished one is given up; `known`: engines that exist."""
        self.abort_all(f"superseded by publish {record.publish_sequence}")
        self.publishes = [publish for publish in self.publishes if publish.awaits(known)]
        cells = {
            cell.cell_id: CellProgress(
                cell, {engine.engine_id: CellPhase.ANNOUNCED for engine in cell.engines}
            )
            for cell in record.cells
        }
        self.publishes.append(Publish(record, buckets, probe, digests, files, cells))

    def restore(self, record: Announced) -> None:
        """The newest publish before a restart of the server: whatever is unfinished is over."""
        no_probe = Probe(sets=[], tolerance=0.0, max_tolerance=0.0)
        self.announce(record, [], no_probe, {}, None, set())
        self.publishes[-1].restored = True
        self.abort_all("the replay server restarted")

    def abort_all(self, reason: str) -> None:
        """Give up everything unfinished."""
        for publish in self.publishes:
            publish.abort(reason)

    def cell(self, publish_sequence: int, cell_id: int) -> CellProgress | None:
        """The cell, if its publish is still remembered."""
        for publish in self.publishes:
            if publish.record.publish_sequence == publish_sequence:
                return publish.cells.get(cell_id)
        return None

    def weights(self, publish_sequence: int) -> WeightsName:
        """What a remembered publish carries."""
        for publish in self.publishes:
            if publish.record.publish_sequence == publish_sequence:
                return publish.record.weights
        raise KeyError(publish_sequence)

    def fail(self, engine_id: str, detail: str) -> set[str]:
        """An engine is gone; returns the generators to which that is news."""
        news = set()
        for publish in self.publishes:
            for progress in publish.cells.values():
                if progress.advance(engine_id, CellPhase.FAILED, detail):
                    news |= progress.generators
        return news

    def observe(self, engine: EngineStatus) -> set[str]:
        """A heartbeat names committed weights; returns the generators to which that is news."""
        news = set()
        for publish in self.publishes:
            record = publish.record
            if engine.publish_sequence < record.publish_sequence:
                continue
            committed = (
                engine.publish_sequence == record.publish_sequence
                and engine.weights == record.weights
            )
            phase = CellPhase.COMMITTED if committed else CellPhase.FAILED
            for progress in publish.cells.values():
                if progress.advance(engine.engine_id, phase, "seen in a heartbeat"):
                    news |= progress.generators
        return news

    def busy_engines(self) -> set[str]:
        """Engines that an unfinished publish still serves."""
        return {
            engine_id
            for publish in self.publishes
            for progress in publish.cells.values()
            if not progress.settled
            for engine_id, phase in progress.phases.items()
            if phase not in _OVER
        }

    def orders(self, generator: str, known: set[str]) -> Iterator[UpdateOrder]:
        """Updates that engines in `known` of this generator have not ended, oldest first."""
        for publish in self.publishes:
            for progress in () if publish.restored else publish.cells.values():
                engines = [
                    engine
                    for engine in progress.cell.engines
                    if engine.generator == generator
                    and engine.engine_id in known
                    and progress.phases[engine.engine_id] not in _OVER
                ]
                if engines:
                    yield _order(publish, progress, engines)


def _order(publish: Publish, progress: CellProgress, engines: list[CellEngine]) -> UpdateOrder:
    return UpdateOrder(
        publish_sequence=publish.record.publish_sequence,
        weights=publish.record.weights,
        cell_id=progress.cell.cell_id,
        engine_ids=[engine.engine_id for engine in engines],
        ranks=[engine.rank_offset for engine in engines],
        buckets=publish.buckets,
        probe=publish.probe,
        digests=publish.digests,
        files=publish.files,
        rendezvous=progress.rendezvous,
        go=progress.go,
        aborted=progress.aborted,
    )


def freeze_cells(engines: list[tuple[str, EngineStatus]], engines_per_cell: int) -> list[Cell]:
    """Cells of (generator, engine) pairs in order; ranks count from 1, rank 0 is the trainer."""
    cells: list[Cell] = []
    for start in range(0, len(engines), engines_per_cell):
        members, rank = [], 1
        for generator, engine in engines[start : start + engines_per_cell]:
            members.append(
                CellEngine(
                    engine_id=engine.engine_id,
                    generator=generator,
                    tp_size=engine.tp_size,
                    rank_offset=rank,
                )
            )
            rank += engine.tp_size
        cells.append(Cell(cell_id=len(cells), engines=members))
    return cells
