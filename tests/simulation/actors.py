"""Simulated generators and the trainer: the protocol of `replay_api`, with made-up groups."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from async_grpo.replay_api import (
    AbortCell,
    Ack,
    Announce,
    AnnounceReply,
    Claim,
    ClaimReply,
    Credit,
    CreditReply,
    Draw,
    DrawReply,
    End,
    EnginePhase,
    Error,
    ErrorCode,
    Fetch,
    Finish,
    GeneratorHeartbeat,
    Insert,
    InsertReply,
    Leave,
    Ok,
    OpenCell,
    StartTrainer,
    StartTrainerReply,
    TrainerHeartbeat,
    WaitCell,
    WaitCellReply,
    Watch,
    WatchReply,
)
from async_grpo.replay_parts import (
    Cell,
    CellPhase,
    EndStats,
    EngineState,
    EngineStatus,
    GroupSummary,
    LeasedGroup,
    Probe,
    Rendezvous,
    Role,
    RoleStatus,
    UpdateOrder,
)
from async_grpo.types import DropReason, InsertOutcome, Ticket, WeightsName
from tests.simulation.schedule import GROUP_BYTES
from tests.simulation.world import Process, World

STATUS = RoleStatus(state="simulated")
HEARTBEAT_S = 2.0
WAIT_S = 5.0
UPDATE_TIMEOUT_S = 8.0
Steps = Generator[Any, Any, Any]


@dataclass(eq=False)
class Engine:
    """An inference server without inference."""

    engine_id: str
    weights: WeightsName | None = None
    publish_sequence: int = 0

    def status(self) -> EngineStatus:
        """As its generator reports it."""
        return EngineStatus(
            engine_id=self.engine_id,
            state=EngineState.SERVING if self.weights else EngineState.SYNCING,
            weights=self.weights,
            publish_sequence=self.publish_sequence,
            wants_sync=self.weights is None,
        )


class GeneratorProcess(Process):
    """Claims, samples, inserts; updates its engines."""

    role = Role.GENERATOR

    def __init__(self, world: World, name: str, start_number: int) -> None:
        super().__init__(world, name, start_number)
        self._engine_numbers = count()
        self.engines = [self._new_engine() for _ in range(world.schedule.num_engines)]
        self.claims: dict[int, Ticket] = {}
        self.orders: dict[tuple[int, int], UpdateOrder] = {}
        self.begun: set[tuple[tuple[int, int], str]] = set()
        self.stopped = False
        self.start(self._heartbeats(), self._claimer(), self._watcher())

    def _new_engine(self) -> Engine:
        return Engine(f"{self.name}/{self.instance}#{next(self._engine_numbers)}")

    def _heartbeats(self) -> Steps:
        while not self.stopped:
            claims = [(ticket.group_id, ticket.attempt) for ticket in self.claims.values()]
            engines = [engine.status() for engine in self.engines]
            yield GeneratorHeartbeat(engines=engines, claims=claims, status=STATUS)
            yield HEARTBEAT_S
        yield Leave(reason="stopped")
        self.exit("stopped")

    def _claimer(self) -> Steps:
        for number in count(1):
            while len(self.claims) >= self.world.schedule.num_slots:
                yield 0.2
            if self.stopped:
                return
            reply = yield Claim(number=number, wait_s=WAIT_S)
            if isinstance(reply, ClaimReply) and reply.ticket is not None:
                self.claims[reply.ticket.group_id] = reply.ticket
                self.spawn(self._work(reply.ticket))

    def _work(self, ticket: Ticket) -> Steps:
        yield from self._produce(ticket)
        if self.claims.get(ticket.group_id) is ticket:
            del self.claims[ticket.group_id]

    def _produce(self, ticket: Ticket) -> Steps:
        rng, key = self.world.rng, (ticket.group_id, ticket.attempt)
        fate = rng.random()
        tokens: dict[WeightsName, int] = {}
        engine = rng.choice(self.engines)
        is_long = rng.random() < 0.2
        for _ in range(rng.randint(1, 3)):
            yield rng.uniform(0.5, 3.0) if is_long else rng.uniform(0.05, 0.5)
            if engine.weights is None or engine not in self.engines:
                engine = next((e for e in self.engines if e.weights is not None), engine)
            if engine.weights is not None:
                tokens[engine.weights] = tokens.get(engine.weights, 0) + rng.randint(1, 5)
        if self.world.faulty and fate < 0.06:
            yield 12.0  # stuck: the group deadline ends it, and its insert comes late
        if fate > 0.95 or not tokens:
            reason = rng.choice([DropReason.NO_SIGNAL, DropReason.REWARD_FAILED])
            stats = EndStats(num_completions=2, num_tokens=sum(tokens.values()), reward_sum=1.0)
            group_id, attempt = key
            yield End(group_id=group_id, attempt=attempt, reason=reason, stats=stats)
            return
        yield from self._insert(key, tokens, fate)

    def _insert(self, key: tuple[int, int], tokens: dict[WeightsName, int], fate: float) -> Steps:
        group_id, attempt = key
        num_bytes = self.world.rng.randint(*GROUP_BYTES)
        summary = GroupSummary(
            group_id=group_id,
            attempt=attempt,
            num_bytes=num_bytes,
            num_completions=2,
            num_tokens=sum(tokens.values()),
            reward_sum=1.0,
            weights_tokens=sorted(tokens.items()),
        )
        asks_first = self.world.rng.random() < 0.7
        while True:
            if asks_first:
                credit = yield Credit(
                    group_id=group_id, attempt=attempt, num_bytes=num_bytes, wait_s=WAIT_S
                )
                assert isinstance(credit, CreditReply), credit
                if credit.fenced:
                    return
                if not credit.granted:
                    continue
            invalid = "made up" if fate > 0.93 else ""
            reply = yield Insert(
                group_id=group_id, attempt=attempt, summary=summary, invalid=invalid
            )
            assert isinstance(reply, InsertReply), reply
            if reply.outcome is not InsertOutcome.FULL:
                return
            yield 0.5

    def _watcher(self) -> Steps:
        seen = 0
        while not self.stopped:
            reply = yield Watch(seen=seen, wait_s=WAIT_S)
            assert isinstance(reply, WatchReply), reply
            seen = reply.revision
            self.stopped = bool(reply.stop)
            for group_id, attempt in reply.cancel:
                if group_id in self.claims and self.claims[group_id].attempt == attempt:
                    del self.claims[group_id]
            self.orders = {(o.publish_sequence, o.cell_id): o for o in reply.orders}
            for key, order in self.orders.items():
                for engine in self.engines:
                    wanted = engine.engine_id in order.engine_ids
                    if wanted and (key, engine.engine_id) not in self.begun:
                        self.begun.add((key, engine.engine_id))
                        self.spawn(self._update(engine, key, order))

    def _update(self, engine: Engine, key: tuple[int, int], order: UpdateOrder) -> Steps:
        yield from self._report(engine, key, CellPhase.BEGUN)
        deadline = self.world.now + UPDATE_TIMEOUT_S
        while True:
            now = self.orders.get(key)
            if now is None or now.aborted or self.world.now > deadline:
                yield from self._report(engine, key, CellPhase.FAILED)
                return
            if now.go:
                break
            yield 0.2
        while key not in self.world.broadcast and self.world.now <= deadline:
            yield 0.2
        broken = self.world.faulty and self.world.rng.random() < 0.1
        if broken or key not in self.world.broadcast:
            if engine in self.engines:
                self.engines.remove(engine)
                self.engines.append(self._new_engine())
            yield from self._report(engine, key, CellPhase.FAILED)
            return
        if order.publish_sequence > engine.publish_sequence:
            engine.weights, engine.publish_sequence = order.weights, order.publish_sequence
        yield from self._report(engine, key, CellPhase.COMMITTED)

    def _report(self, engine: Engine, key: tuple[int, int], phase: CellPhase) -> Steps:
        sequence, cell_id = key
        yield EnginePhase(
            publish_sequence=sequence, cell_id=cell_id, engine_id=engine.engine_id, phase=phase
        )


class TrainerProcess(Process):
    """Draws, acks, publishes; starts from the newest or an earlier checkpoint."""

    role = Role.TRAINER

    def __init__(self, world: World, name: str, start_number: int) -> None:
        super().__init__(world, name, start_number)
        self.incarnation = 0
        self.version = 0
        self.draws: set[int] = set()
        self._publish_numbers = count(1)
        self.start(self._main())

    def _main(self) -> Steps:
        checkpoints = self.world.checkpoints
        newest = self.world.rng.random() < 0.7
        self.version = checkpoints[-1] if newest else self.world.rng.choice(checkpoints)
        while True:
            reply = yield StartTrainer(restored_version=self.version)
            if isinstance(reply, StartTrainerReply):
                break
            assert isinstance(reply, Error), reply
            assert reply.code is ErrorCode.TRAINER_ALIVE, reply
            yield 1.0
        self.incarnation = reply.incarnation
        self.world.checkpoints = [v for v in checkpoints if v <= self.version]
        self.spawn(self._heartbeats())
        yield from self._publish(wished_only=False)
        yield from self._train(count(reply.next_draw_number))

    def _train(self, numbers: Iterator[int]) -> Steps:
        world, last = self.world, self.world.schedule.settings.num_train_steps
        prefetched = None
        number = 0
        while self.version < last:
            if prefetched is None:
                number = next(numbers)
                groups = yield from self._draw(number, self.version)
            else:
                number, groups = prefetched
                prefetched = None
            for group in groups:
                yield from self._fetch(group)
            yield world.rng.uniform(0.1, 0.8)
            if world.schedule.prefetch and self.version + 1 < last:
                prefetched = yield from self._prefetch(numbers)
            yield from self._ack(number, groups)
            if self.version % world.schedule.publish_every == 0 and self.version < last:
                yield from self._publish(wished_only=False)
        yield from self._checked(Finish(incarnation=self.incarnation, reason="all steps done"))
        self.exit("finished")

    def _checked(self, request: Any) -> Steps:
        """The reply; an error ends the process."""
        reply = yield request
        if isinstance(reply, Error):
            self.exit(f"{type(request).__name__} refused: {reply.message}")
            yield 0.0
        return reply

    def _draw(self, number: int, version: int) -> Steps:
        self.draws.add(number)
        while True:
            reply = yield from self._checked(self._draw_request(number, version))
            assert isinstance(reply, DrawReply), reply
            if reply.groups:
                return reply.groups
            if reply.wishes:
                yield from self._publish(wished_only=True)
                yield 0.5

    def _prefetch(self, numbers: Iterator[int]) -> Steps:
        """One try at the groups of the next step, while this one's are held."""
        number = next(numbers)
        self.draws.add(number)
        reply = yield from self._checked(self._draw_request(number, self.version + 1))
        if reply.groups:
            return number, reply.groups
        self.draws.discard(number)
        return None

    def _draw_request(self, number: int, version: int) -> Draw:
        return Draw(
            incarnation=self.incarnation, draw_number=number, train_version=version, wait_s=WAIT_S
        )

    def _fetch(self, group: LeasedGroup) -> Steps:
        """The payload; one that went with a restart costs the trainer its life."""
        yield from self._checked(
            Fetch(incarnation=self.incarnation, group_id=group.group_id, attempt=group.attempt)
        )

    def _ack(self, number: int, groups: list[LeasedGroup]) -> Steps:
        keys = [(group.group_id, group.attempt) for group in groups]
        world = self.world
        world.trained[self.version] = (self.incarnation, keys)
        yield from self._checked(
            Ack(incarnation=self.incarnation, step=self.version, draw_number=number, groups=keys)
        )
        self.draws.discard(number)
        self.version += 1
        if world.rng.random() < 0.5:
            world.checkpoints.append(self.version)

    def _heartbeats(self) -> Steps:
        while True:
            draws = sorted(self.draws)
            yield from self._checked(
                TrainerHeartbeat(incarnation=self.incarnation, draws=draws, status=STATUS)
            )
            yield HEARTBEAT_S

    def _publish(self, *, wished_only: bool) -> Steps:
        reply = yield from self._checked(
            Announce(
                incarnation=self.incarnation,
                number=next(self._publish_numbers),
                weights=WeightsName(self.incarnation, self.version),
                wished_only=wished_only,
                plan_hash="",
                buckets=[],
                probe=Probe(token_ids=[], logprobs=[], tolerance=0.0),
            )
        )
        assert isinstance(reply, AnnounceReply), reply
        for cell in reply.cells:
            yield from self._serve(reply.publish_sequence, cell)

    def _serve(self, sequence: int, cell: Cell) -> Steps:
        rendezvous = Rendezvous(
            group_name=f"{sequence}-{cell.cell_id}",
            host="",
            port=1,
            world_size=1 + len(cell.engines),
            backend="",
            fresh=True,
        )
        opened = yield OpenCell(
            incarnation=self.incarnation,
            publish_sequence=sequence,
            cell_id=cell.cell_id,
            rendezvous=rendezvous,
        )
        for phase in (CellPhase.BEGUN, CellPhase.COMMITTED):
            reached = isinstance(opened, Ok)
            if reached:
                reached = yield from self._wait_cell(sequence, cell, phase)
            if not reached:
                yield from self._checked(
                    AbortCell(
                        incarnation=self.incarnation,
                        publish_sequence=sequence,
                        cell_id=cell.cell_id,
                        reason=f"not {phase.value}",
                    )
                )
                return
            if phase is CellPhase.BEGUN:
                yield self.world.rng.uniform(0.05, 0.5)
                self.world.broadcast.add((sequence, cell.cell_id))

    def _wait_cell(self, sequence: int, cell: Cell, phase: CellPhase) -> Steps:
        """Whether every engine of the cell reached the phase in time."""
        deadline = self.world.now + UPDATE_TIMEOUT_S
        while self.world.now < deadline:
            reply = yield WaitCell(
                incarnation=self.incarnation,
                publish_sequence=sequence,
                cell_id=cell.cell_id,
                phase=phase,
                wait_s=2.0,
            )
            if not isinstance(reply, WaitCellReply):
                return False
            phases = set(reply.phases.values())
            if CellPhase.FAILED in phases:
                return False
            if phases <= {phase, CellPhase.COMMITTED}:
                return True
        return False
