"""Simulated time, network, processes and the server around a real core.

A process is a set of Python generators that yield seconds to sleep or a request to send; they
resume with the reply. Requests are repeated until a reply arrives, as the real clients do.
"""

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from async_grpo.replay.core.core import ReplayCore
from async_grpo.replay.core.events import Effects, Joined, Received, Tick
from async_grpo.replay.core.image import decode_state, encode_state
from async_grpo.replay.core.records import decode_record, encode_record
from async_grpo.replay.core.tickets import HELD
from async_grpo.replay_api.base import Error, ErrorCode
from async_grpo.replay_api.generator import Insert, InsertReply
from async_grpo.replay_api.peers import Leave
from async_grpo.replay_api.protocol import Reply, Request
from async_grpo.replay_parts import Dataset, Role
from async_grpo.types import InsertOutcome, WeightsName
from tests.simulation.schedule import Schedule
from tests.simulation.shadow import Shadow

Task = Generator[Any, Any, None]
TICK_S = 1.0
RETRY_S = 1.5
CLEAN_DELAY_S = 0.02


class World:
    """One run: everything is reached from here."""

    def __init__(
        self, schedule: Schedule, core_class: type[ReplayCore], trace: Callable[[str], None] | None
    ) -> None:
        self.schedule = schedule
        self.rng = random.Random(schedule.seed)
        self.now = 0.0
        self.num_events = 0
        self.faulty = schedule.faults_until_s > 0
        self.trace = trace
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self.shadow = Shadow(schedule.settings)
        self.broadcast: set[tuple[int, int]] = set()
        """(publish_sequence, cell_id) whose buckets have left the trainer"""
        self.checkpoints: list[WeightsName] = [WeightsName(0, 0)]
        """that a trainer may find, the newest last; 0.0: the initial weights"""
        self.discarded: list[WeightsName] = []
        """removed since, or undone by a trainer that fell back behind them"""
        self.trained: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        """the trainer's witness: step -> (incarnation, groups), the newest"""
        self.server = Server(self, core_class)

    def log(self, text: str) -> None:
        """One line of the trace."""
        if self.trace:
            self.trace(f"{self.now:8.3f} {text}")

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something later."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), action, arguments))

    def advance(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._queue:
            return False
        self.now, _, action, arguments = heapq.heappop(self._queue)
        self.num_events += 1
        action(*arguments)
        return True

    def send(self, process: "Process", deliver: Callable[..., None], *arguments: Any) -> None:
        """A message from or to a process: lost, doubled and late while faults last."""
        if self.now < process.partitioned_until:
            return
        copies, mean = 1, CLEAN_DELAY_S
        if self.faulty:
            chance = self.rng.random()
            if chance < self.schedule.loss:
                copies = 0
            elif chance < self.schedule.loss + self.schedule.duplication:
                copies = 2
            mean = self.schedule.mean_delay_s
        for _ in range(copies):
            self.after(self.rng.expovariate(1 / mean), deliver, *arguments)


@dataclass(eq=False)
class Call:
    """A request under way."""

    process: "Process"
    request: Request
    task: Task | None
    """None: the hello"""


class Process:
    """A peer. Subclasses give it tasks; `kill` ends it like kill -9."""

    role: Role

    def __init__(self, world: World, name: str, start_number: int) -> None:
        self.world = world
        self.name = name
        self.instance = f"{name}#{start_number}"
        self.alive = True
        self.on_end: Callable[[Process], None] = lambda process: None
        self.partitioned_until = 0.0
        self._calls: dict[int, Call] = {}
        self._numbers = count()

    def hello(self) -> Joined:
        """What the server makes of this peer's hello."""
        dataset = Dataset(fingerprint="d", num_prompts=self.world.schedule.num_prompts)
        return Joined(
            self.instance, self.role, self.name, dataset if self.role is Role.GENERATOR else None
        )

    def kill(self) -> None:
        """Gone, without a word."""
        if self.alive:
            self.alive = False
            self._calls.clear()
            self.on_end(self)

    def exit(self, why: str) -> None:
        """The process ends by itself; a supervisor restarts it unless the run is over."""
        self.world.log(f"{self.instance} exits: {why}")
        self.kill()

    def start(self, *tasks: Task) -> None:
        """Say hello, then start the tasks."""
        self.world.send(self, self.world.server.hello, self)
        for task in tasks:
            self.world.after(0.2, self._step, task, None)

    def spawn(self, task: Task) -> None:
        """Start another task."""
        self._step(task, None)

    def _step(self, task: Task, value: Any) -> None:
        if not self.alive:
            return
        try:
            wanted = task.send(value)
        except StopIteration:
            return
        if isinstance(wanted, float | int):
            self.world.after(wanted, self._step, task, None)
        else:
            number = next(self._numbers)
            self._calls[number] = Call(self, wanted, task)
            self._transmit(number)

    def _transmit(self, number: int) -> None:
        call = self._calls.get(number)
        if call is None:
            return
        self.world.send(self, self.world.server.receive, self, number, call.request)
        if self.world.faulty or self.world.server.core is None:  # else nothing is ever lost
            wait_s: float = getattr(call.request, "wait_s", 0.0)
            self.world.after(wait_s + RETRY_S, self._transmit, number)

    def on_reply(self, number: int, reply: Reply) -> None:
        """A reply arrives; only the first to a request counts."""
        call = self._calls.get(number)
        if call is None or not self.alive:
            return
        if isinstance(reply, Error) and reply.code is ErrorCode.HELLO_REQUIRED:
            self.world.send(self, self.world.server.hello, self)
            self.world.after(0.3, self._transmit, number)
            return
        del self._calls[number]
        assert call.task is not None
        self._step(call.task, reply)


@dataclass(eq=False)
class Parked:
    """A long poll that has no answer yet."""

    process: Process
    number: int
    request: Request
    deadline: float


@dataclass(eq=False)
class Server:
    """What the real server does around the core: ledger, payloads, parked requests, hellos."""

    world: World
    core_class: type[ReplayCore]
    ledger: list[Any] = field(default_factory=list)
    image: tuple[int, bytes] | None = None
    """the newest snapshot: of so many records"""
    core: ReplayCore | None = None
    sessions: set[str] = field(default_factory=set)
    parked: list[Parked] = field(default_factory=list)
    payloads: set[tuple[int, int]] = field(default_factory=set)
    num_restarts: int = 0
    finished: bool = False
    tear_after: int = -1
    """crash while writing the records of an event, after so many of them; -1: do not"""
    next_image: int = 50
    """records at which the next snapshot is taken"""

    def __post_init__(self) -> None:
        # of its own: snapshots must not change what happens under a seed
        self.image_rng = random.Random(self.world.schedule.seed)

    def start(self) -> None:
        """Come up, from the ledger if there is one, and from the newest snapshot if there is."""
        settings, state, first = self.world.schedule.settings, None, 0
        if self.image is not None:
            first, image = self.image
            state = decode_state(image, settings)
        records = [decode_record(encode_record(record)) for record in self.ledger[first:]]
        self.core = self.core_class.restore(settings, records, self.world.now, state=state)
        self._tick(self.core)

    def _take_snapshot(self, core: ReplayCore) -> None:
        """At some point of the next records, as the schedule's seed has it."""
        if len(self.ledger) >= self.next_image:
            self.image = len(self.ledger), encode_state(core.state)
            self.next_image = len(self.ledger) + self.image_rng.randint(1, 200)

    def crash(self) -> None:
        """Kill -9: everything but the ledger is gone; the core rebuilt from it must be the same."""
        assert self.core is not None
        before = self.core.state
        self.core = None
        self.sessions.clear()
        self.parked.clear()
        self.payloads.clear()
        if self.tear_after < 0:
            rebuilt = self.core_class(self.world.schedule.settings).state
            for record in self.ledger:
                rebuilt.evolve(record)
            assert rebuilt == before, "the ledger does not rebuild the state that wrote it"
            if self.image is not None:
                first, image = self.image
                rebuilt = decode_state(image, self.world.schedule.settings)
                for record in self.ledger[first:]:
                    rebuilt.evolve(record)
                assert rebuilt == before, "the snapshot does not rebuild the state that wrote it"
                assert encode_state(rebuilt) == encode_state(before), "another order of tickets"
        self.tear_after = -1
        self.num_restarts += 1
        self.world.log("server crashed")
        self.world.after(self.world.rng.uniform(0.1, 4.0), self.start)

    def _tick(self, core: ReplayCore) -> None:
        if self.core is not core:
            return
        self._settle(self._apply(Tick()))
        if self.core is not core:
            return
        for asked in [asked for asked in self.parked if asked.deadline <= self.world.now]:
            self.parked.remove(asked)
            self._reply(asked, core.empty_reply(asked.request, asked.process.instance))
        self.world.after(TICK_S, self._tick, core)

    def hello(self, process: Process) -> None:
        """A peer's hello arrives."""
        if self.core is None:
            return
        self.sessions.add(process.instance)
        self._settle(self._apply(process.hello()))

    def receive(self, process: Process, number: int, request: Request) -> None:
        """A request arrives."""
        if self.core is None:
            return
        asked = Parked(process, number, request, self.world.now + getattr(request, "wait_s", 0.0))
        if process.instance not in self.sessions:
            error = Error(code=ErrorCode.HELLO_REQUIRED, message="say hello")
            self._reply(asked, error)
            return
        self.parked = [
            other for other in self.parked if (other.process, other.number) != (process, number)
        ]
        if self._ask(asked):
            self._retry_parked()

    def _ask(self, asked: Parked) -> bool:
        effects = self._apply(Received(asked.process.instance, asked.request))
        if effects is None:
            return False
        request, reply = asked.request, effects.reply
        if isinstance(request, Insert) and isinstance(reply, InsertReply):
            if reply.outcome is InsertOutcome.STORED:
                self.payloads.add((request.group_id, request.attempt))
                self._check_payloads()
        elif isinstance(request, Leave):
            self.sessions.discard(asked.process.instance)
        if reply is None:
            self.parked.append(asked)
        else:
            self._reply(asked, reply)
        return effects.changed

    def _apply(self, event: Any) -> Effects | None:
        """One event; None if the server crashed on it."""
        core, world = self.core, self.world
        assert core is not None
        effects = core.apply(event, world.now)
        if world.trace and (effects.records or isinstance(event, Received)):
            world.log(f"{event} -> {effects.reply} {effects.records} freed={effects.freed}")
        if effects.records and 0 <= self.tear_after < len(effects.records):
            written = effects.records[: self.tear_after]
            self.ledger += written
            world.shadow.read(written)
            self.crash()
            return None
        self.ledger += effects.records
        self._take_snapshot(core)
        world.shadow.read(effects.records)
        self.payloads.difference_update(effects.freed)
        if effects.records or effects.changed:
            self.finished = bool(core.state.versions.finished)
            core.check_invariants()
        if effects.records:
            world.shadow.compare(core.stats(world.now))
            if not isinstance(event, Received) or not isinstance(event.request, Insert):
                self._check_payloads()
        return effects

    def _check_payloads(self) -> None:
        """The server holds what the core thinks it holds, except what a restart took."""
        assert self.core is not None
        held = {ticket.key for ticket in self.core.state.book.held()}
        assert self.payloads <= held, f"payloads {self.payloads - held} were never freed"
        stored = self.core.state.book.by_phase[HELD[0]].values()
        missing = {ticket.key for ticket in stored} - self.payloads
        assert not missing, f"stored groups {missing} have no payload"

    def _settle(self, effects: Effects | None) -> None:
        if effects is not None and effects.changed:
            self._retry_parked()

    def _retry_parked(self) -> None:
        for _ in range(100):
            waiting, self.parked = self.parked, []
            changes = [self._ask(asked) for asked in waiting if self.core is not None]
            if not any(changes):
                return
        raise AssertionError("parked requests change the core for ever")

    def _reply(self, asked: Parked, reply: Reply) -> None:
        self.world.send(asked.process, asked.process.on_reply, asked.number, reply)
