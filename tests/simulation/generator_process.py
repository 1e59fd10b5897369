"""A simulated generator: the protocol of `replay_api`, with made-up groups."""

from collections.abc import Generator
from dataclasses import dataclass
from itertools import count
from typing import Any

from async_grpo.replay_api.generator import (
    Claim,
    ClaimReply,
    Credit,
    CreditReply,
    End,
    EnginePhase,
    GeneratorHeartbeat,
    Insert,
    InsertReply,
    Watch,
    WatchReply,
)
from async_grpo.replay_api.peers import Leave
from async_grpo.replay_parts import (
    CellPhase,
    EndStats,
    EngineState,
    EngineStatus,
    GroupSummary,
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
        if self.world.faulty and fate < 0.12:
            yield 8.0  # stuck: the group deadline ends it, and its insert comes late
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
        asks_first = self.world.rng.random() < 0.5
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
