"""Drives a core by hand: short names for events, a clock, and the ledger it writes."""

from dataclasses import dataclass, field
from typing import Any

from async_grpo.replay.core.core import ReplayCore
from async_grpo.replay.core.events import Effects, Joined, Received, Tick
from async_grpo.replay.core.records import Record, decode_record, encode_record
from async_grpo.replay.core.settings import CoreSettings
from async_grpo.replay_api.generator import (
    Claim,
    Credit,
    End,
    EnginePhase,
    GeneratorHeartbeat,
    Insert,
)
from async_grpo.replay_api.protocol import Reply, Request
from async_grpo.replay_api.publishing import Announce, OpenCell
from async_grpo.replay_api.trainer import Ack, Draw, StartTrainer, TrainerHeartbeat
from async_grpo.replay_parts import (
    CellPhase,
    Dataset,
    EngineState,
    EngineStatus,
    GroupSummary,
    Rendezvous,
    Role,
    RoleStatus,
)
from async_grpo.types import DropReason, Ticket, WeightsName
from tests.fakes.fake_engine import probe_of

STATUS = RoleStatus(state="test")
PROBE = probe_of([1, 2], [-1.0], 0.1)
DATASET = Dataset(fingerprint="f", num_prompts=5)


def settings(**changes: Any) -> CoreSettings:
    """Two groups per step, D = 1, S = 1, three steps."""
    values: dict[str, Any] = {
        "groups_per_step": 2,
        "num_train_steps": 3,
        "max_staleness": 1,
        "pipeline_depth": 1,
        "max_groups": 6,
        "max_bytes": 1000,
        "peer_timeout_s": 6.0,
        "group_timeout_s": 60.0,
    }
    return CoreSettings(**{**values, **changes})


def engine(name: str = "g", weights: WeightsName | None = None, **changes: Any) -> EngineStatus:
    """An engine as a heartbeat shows it; it wishes weights if it has none."""
    values: dict[str, Any] = {
        "engine_id": f"{name}/0#1",
        "state": EngineState.SERVING,
        "weights": weights,
        "publish_sequence": 1 if weights else 0,
        "wants_sync": weights is None,
    }
    return EngineStatus(**{**values, **changes})


@dataclass
class Driver:
    """One core, its clock and its ledger."""

    settings: CoreSettings = field(default_factory=settings)
    now: float = 0.0
    ledger: list[Record] = field(default_factory=list)
    freed: list[tuple[int, int]] = field(default_factory=list)
    claim_number: int = 0
    incarnation: int = 1

    def __post_init__(self) -> None:
        self.core = ReplayCore(self.settings)

    def apply(self, event: Any) -> Effects:
        """One event; invariants hold after it."""
        effects = self.core.apply(event, self.now)
        self.ledger += effects.records
        self.freed += effects.freed
        self.core.check_invariants()
        return effects

    def ask(self, request: Request, peer: str = "g#1") -> Reply | None:
        """The reply to a request."""
        return self.apply(Received(peer, request)).reply

    def tick(self, seconds: float = 0.0) -> Effects:
        """Time passes."""
        self.now += seconds
        return self.apply(Tick())

    def restart(self, seconds: float = 0.0) -> Effects:
        """The server dies and comes back; the effects of its first event."""
        self.now += seconds
        records = [decode_record(encode_record(record)) for record in self.ledger]
        self.core = ReplayCore.restore(self.settings, records, self.now)
        return self.tick()

    # -- peers ----------------------------------------------------------------------------------

    def join(self, name: str = "g", instance: str = "", dataset: Dataset | None = DATASET) -> Any:
        """A generator says hello."""
        return self.apply(
            Joined(instance or f"{name}#1", Role.GENERATOR, name, dataset, "run-77")
        ).reply

    def start_trainer(
        self, instance: str = "t#1", restored_version: int = 0, restored_incarnation: int = 0
    ) -> Any:
        """A trainer says hello and starts."""
        self.apply(Joined(instance, Role.TRAINER, "trainer"))
        request = StartTrainer(
            restored_version=restored_version, restored_incarnation=restored_incarnation
        )
        return self.ask(request, instance)

    def generator_beat(
        self,
        *engines: EngineStatus,
        peer: str = "g#1",
        claims: list[tuple[int, int]] | None = None,
    ) -> Any:
        """A generator's heartbeat."""
        beat = GeneratorHeartbeat(engines=list(engines), claims=claims or [], status=STATUS)
        return self.ask(beat, peer)

    def trainer_beat(self, *draws: int, peer: str = "t#1") -> Any:
        """The trainer's heartbeat."""
        beat = TrainerHeartbeat(incarnation=self.incarnation, draws=list(draws), status=STATUS)
        return self.ask(beat, peer)

    def ready(self) -> "Driver":
        """One generator and a trainer, weights 1.0 live."""
        self.join()
        self.start_trainer()
        self.generator_beat(engine())
        self.publish(0, "g/0#1")
        return self

    # -- requests ---------------------------------------------------------------------------------

    def claim(self, peer: str = "g#1") -> Ticket | None:
        """A new claim's ticket, if any is handed out at once."""
        self.claim_number += 1
        reply: Any = self.ask(Claim(number=self.claim_number, wait_s=1.0), peer)
        return reply.ticket if reply else None

    def credit(self, group_id: int, attempt: int = 1, num_bytes: int = 10) -> Any:
        """Ask for room."""
        return self.ask(Credit(group_id=group_id, attempt=attempt, num_bytes=num_bytes, wait_s=1.0))

    def insert(
        self,
        group_id: int,
        attempt: int = 1,
        *weights: tuple[int, int],
        num_bytes: int = 10,
        invalid: str = "",
    ) -> str:
        """The outcome of inserting a group with 5 tokens of each of `weights` (1.0)."""
        names = [WeightsName(*name) for name in weights or ((1, 0),)]
        summary = GroupSummary(
            group_id=group_id,
            attempt=attempt,
            num_bytes=num_bytes,
            num_completions=2,
            num_tokens=5 * len(names),
            reward_sum=1.5,
            weights_tokens=[(name, 5) for name in names],
        )
        reply: Any = self.ask(
            Insert(group_id=group_id, attempt=attempt, summary=summary, invalid=invalid)
        )
        outcome: str = reply.outcome.value
        return outcome

    def end(
        self, group_id: int, attempt: int = 1, reason: DropReason = DropReason.NO_SIGNAL
    ) -> Any:
        """Give a ticket up."""
        return self.ask(End(group_id=group_id, attempt=attempt, reason=reason))

    def store(self, num_groups: int, *weights: tuple[int, int]) -> list[int]:
        """Claim and insert; the group ids."""
        tickets = [self.claim() for _ in range(num_groups)]
        for ticket in tickets:
            assert ticket is not None, "nothing was handed out"
            assert self.insert(ticket.group_id, ticket.attempt, *weights) == "stored"
        return [ticket.group_id for ticket in tickets if ticket]

    def draw(self, number: int, version: int, peer: str = "t#1") -> Any:
        """Ask for the groups of a step."""
        return self.ask(
            Draw(
                incarnation=self.incarnation,
                draw_number=number,
                train_version=version,
                wait_s=1.0,
            ),
            peer,
        )

    def ack(self, step: int, number: int, groups: list[tuple[int, int]], peer: str = "t#1") -> Any:
        """A step was applied."""
        return self.ask(
            Ack(incarnation=self.incarnation, step=step, draw_number=number, groups=groups), peer
        )

    def train(self, number: int, version: int) -> list[tuple[int, int]]:
        """Draw and ack; the groups."""
        groups = [(g.group_id, g.attempt) for g in self.draw(number, version).groups]
        assert type(self.ack(version, number, groups)).__name__ == "Ok"
        return groups

    def announce(self, number: int, version: int, *, wished_only: bool = False) -> Any:
        """Start a publish."""
        return self.ask(
            Announce(
                incarnation=self.incarnation,
                number=number,
                weights=WeightsName(self.incarnation, version),
                wished_only=wished_only,
                plan_hash="h",
                buckets=[],
                probe=PROBE,
                digests={},
            ),
            "t#1" if self.incarnation == 1 else f"t#{self.incarnation}",
        )

    def open_cell(self, sequence: int, cell_id: int = 0) -> Any:
        """The trainer listens."""
        rendezvous = Rendezvous(
            group_name="n", host="h", port=1, world_size=2, backend="gloo", fresh=True
        )
        return self.ask(
            OpenCell(
                incarnation=self.incarnation,
                publish_sequence=sequence,
                cell_id=cell_id,
                rendezvous=rendezvous,
            ),
            f"t#{self.incarnation}",
        )

    def phase(
        self, sequence: int, engine_id: str, phase: CellPhase, cell_id: int = 0, peer: str = "g#1"
    ) -> Any:
        """An engine reports."""
        return self.ask(
            EnginePhase(
                publish_sequence=sequence, cell_id=cell_id, engine_id=engine_id, phase=phase
            ),
            peer,
        )

    def publish(self, version: int, engine_id: str) -> None:
        """Announce to all and let one engine commit."""
        number = sum(type(record).__name__ == "Announced" for record in self.ledger) + 1
        reply = self.announce(number, version)
        self.phase(reply.publish_sequence, engine_id, CellPhase.COMMITTED)
        assert self.core.live == WeightsName(self.incarnation, version)
