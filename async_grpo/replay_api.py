"""Messages between the roles and the replay server: the whole protocol on one page.

Every request is a tagged msgspec struct, sent as `Request.body`; every request names its reply
class as `reply`. The replay core consumes the same structs as events. Unknown fields and unknown
tags are refused. A request marked *idempotent* may be sent again after a lost reply; all of them
are, by the key that its docstring names. *Long poll*: the server answers when it can say
something, at the latest after `wait_s`.

Control and bulk travel on two connections to one address; only `Insert` (request) and `Fetch`
(reply) carry payload frames, and only they use the bulk connection.
"""

from enum import StrEnum
from typing import ClassVar

from async_grpo.replay_parts import (
    BucketSpec,
    Cell,
    CellPhase,
    Dataset,
    EndStats,
    EngineStatus,
    EvalResult,
    GeneratedStats,
    GroupSummary,
    LeasedGroup,
    Probe,
    Rendezvous,
    Role,
    RoleStatus,
    Struct,
    UpdateOrder,
)
from async_grpo.types import DropReason, InsertOutcome, Ticket, WeightsName

WIRE_VERSION = 1
"""Raised by every change of a message or of the group codec; peers must agree on it."""


class ErrorCode(StrEnum):
    """Why the server refused a request."""

    HELLO_REQUIRED = "hello_required"
    """the server restarted or never met this peer; say hello and repeat the request"""
    WIRE_MISMATCH = "wire_mismatch"
    CONFIG_MISMATCH = "config_mismatch"
    BAD_REQUEST = "bad_request"
    TRAINER_ALIVE = "trainer_alive"
    """another trainer's heartbeat lives"""
    FENCED = "fenced"
    """the sender's incarnation is not the current one"""
    NOT_FOUND = "not_found"
    STOPPING = "stopping"


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all requests and replies; the class name is the tag."""


class Ok(Message, frozen=True, kw_only=True, tag="Ok"):
    """Done; nothing to tell."""


class Error(Message, frozen=True, kw_only=True, tag="Error"):
    """The request was refused."""

    code: ErrorCode
    message: str


class HelloReply(Message, frozen=True, kw_only=True, tag="HelloReply"):
    """The server's side of the handshake."""

    incarnation: int
    """of the newest trainer; 0 before the first"""
    policy_version: int
    """train steps acked"""
    credit_bytes: int
    """bytes of inserts that one connection may have unanswered"""
    max_group_bytes: int


class Hello(Message, frozen=True, kw_only=True, tag="Hello"):
    """First message on each connection. Idempotent by `instance`."""

    reply: ClassVar[type[Message]] = HelloReply
    role: Role
    name: str
    instance: str
    """unique per process: a restarted role says hello under a new one, which ends the old one"""
    wire_version: int
    config_digest: str
    bulk: bool
    dataset: Dataset | None = None


class ClaimReply(Message, frozen=True, kw_only=True, tag="ClaimReply"):
    """None: nothing may be handed out yet; ask again."""

    ticket: Ticket | None = None


class Claim(Message, frozen=True, kw_only=True, tag="Claim"):
    """A generator asks for a ticket. Long poll. Idempotent by (instance, number)."""

    reply: ClassVar[type[Message]] = ClaimReply
    number: int
    """1, 2, ...; a new number says that the reply to the last one arrived"""
    wait_s: float


class CreditReply(Message, frozen=True, kw_only=True, tag="CreditReply"):
    """Granted: that many bytes are reserved in the buffer until the insert."""

    granted: bool
    fenced: bool = False
    """the attempt is over: drop the group"""


class Credit(Message, frozen=True, kw_only=True, tag="Credit"):
    """Ask for room before the payload is sent. Long poll. Idempotent by (group_id, attempt).

    Ends the group deadline: from now only heartbeat loss ends the claim.
    """

    reply: ClassVar[type[Message]] = CreditReply
    group_id: int
    attempt: int
    num_bytes: int
    wait_s: float


class InsertReply(Message, frozen=True, kw_only=True, tag="InsertReply"):
    """What became of the group."""

    outcome: InsertOutcome
    detail: str = ""


class Insert(Message, frozen=True, kw_only=True, tag="Insert"):
    """Bulk, payload frames follow. Idempotent by (group_id, attempt).

    `summary` is None on the wire: the server fills it in from the frames before it asks the core.
    """

    reply: ClassVar[type[Message]] = InsertReply
    group_id: int
    attempt: int
    summary: GroupSummary | None = None
    invalid: str = ""
    """why the frames were refused; set by the server, never by a peer"""


class EndReply(Message, frozen=True, kw_only=True, tag="EndReply"):
    """Accepted: the ticket ended (again: idempotent). Fenced: another attempt is under way."""

    fenced: bool = False


class End(Message, frozen=True, kw_only=True, tag="End"):
    """The attempt ends without an insert. Idempotent by (group_id, attempt)."""

    reply: ClassVar[type[Message]] = EndReply
    group_id: int
    attempt: int
    reason: DropReason
    detail: str = ""
    stats: EndStats = EndStats()


class Evaluated(Message, frozen=True, kw_only=True, tag="Evaluated"):
    """An eval ticket was sampled and scored. Idempotent by (group_id, attempt)."""

    reply: ClassVar[type[Message]] = EndReply
    group_id: int
    attempt: int
    stats: EndStats
    weights_tokens: list[tuple[WeightsName, int]]


class WatchReply(Message, frozen=True, kw_only=True, tag="WatchReply"):
    """State, not events: a notice that was missed is in the next reply."""

    revision: int
    orders: list[UpdateOrder] = []
    """unfinished updates of this generator's engines"""
    cancel: list[tuple[int, int]] = []
    """(group_id, attempt) of claims that can no longer be trained"""
    live: WeightsName | None = None
    stop: str = ""
    """why the run is over; empty while it goes on"""


class Watch(Message, frozen=True, kw_only=True, tag="Watch"):
    """What a generator must know. Long poll: answers when `revision` has passed `seen`."""

    reply: ClassVar[type[Message]] = WatchReply
    seen: int
    wait_s: float


class EnginePhase(Message, frozen=True, kw_only=True, tag="EnginePhase"):
    """An engine reached a phase of an update. Idempotent."""

    reply: ClassVar[type[Message]] = Ok
    publish_sequence: int
    cell_id: int
    engine_id: str
    phase: CellPhase
    detail: str = ""


class GeneratorHeartbeat(Message, frozen=True, kw_only=True, tag="GeneratorHeartbeat"):
    """I live; these are my engines and my claims."""

    reply: ClassVar[type[Message]] = Ok
    engines: list[EngineStatus]
    claims: list[tuple[int, int]]
    status: RoleStatus


class StartTrainerReply(Message, frozen=True, kw_only=True, tag="StartTrainerReply"):
    """The new trainer's incarnation."""

    incarnation: int
    next_draw_number: int


class StartTrainer(Message, frozen=True, kw_only=True, tag="StartTrainer"):
    """Become the run's trainer. Idempotent by instance; `TRAINER_ALIVE` while another lives."""

    reply: ClassVar[type[Message]] = StartTrainerReply
    restored_version: int
    """policy_version of the checkpoint it starts from; 0: the initial weights"""
    restored_incarnation: int = 0
    """incarnation of that checkpoint; 0: the initial weights"""


class TrainerHeartbeat(Message, frozen=True, kw_only=True, tag="TrainerHeartbeat"):
    """I live; any lease not listed here is released."""

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    draws: list[int]
    """draw numbers held or being asked for"""
    status: RoleStatus


class DrawReply(Message, frozen=True, kw_only=True, tag="DrawReply"):
    """Groups, or wishes, or neither (ask again)."""

    groups: list[LeasedGroup] = []
    generated: GeneratedStats = GeneratedStats()
    wishes: list[str] = []
    """engine ids that want the current weights; only when there are no groups"""


class Draw(Message, frozen=True, kw_only=True, tag="Draw"):
    """Lease `groups_per_step` groups. Long poll. Idempotent by (incarnation, draw_number)."""

    reply: ClassVar[type[Message]] = DrawReply
    incarnation: int
    draw_number: int
    train_version: int
    """policy_version that the step will start from"""
    wait_s: float


class FetchReply(Message, frozen=True, kw_only=True, tag="FetchReply"):
    """Bulk; the group's frames follow."""


class Fetch(Message, frozen=True, kw_only=True, tag="Fetch"):
    """Payload of one leased group; may be asked again until the ack."""

    reply: ClassVar[type[Message]] = FetchReply
    incarnation: int
    group_id: int
    attempt: int


class Ack(Message, frozen=True, kw_only=True, tag="Ack"):
    """Step `step` was applied: its groups are trained, policy_version is step + 1.

    Idempotent by (incarnation, step).
    """

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    step: int
    """the version that the step started from"""
    draw_number: int
    groups: list[tuple[int, int]]


class Settle(Message, frozen=True, kw_only=True, tag="Settle"):
    """The oldest kept checkpoint holds `policy_version`: no earlier step will be undone.

    Idempotent; a smaller version than before changes nothing.
    """

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    policy_version: int


class AnnounceReply(Message, frozen=True, kw_only=True, tag="AnnounceReply"):
    """The frozen cells; empty: nobody to publish to."""

    publish_sequence: int
    cells: list[Cell]


class Announce(Message, frozen=True, kw_only=True, tag="Announce"):
    """Start a publish. Idempotent by (incarnation, number)."""

    reply: ClassVar[type[Message]] = AnnounceReply
    incarnation: int
    number: int
    weights: WeightsName
    wished_only: bool
    """only to engines that wish, as cells of their own"""
    plan_hash: str
    buckets: list[BucketSpec]
    probe: Probe


class OpenCell(Message, frozen=True, kw_only=True, tag="OpenCell"):
    """Trainer rank 0 listens for this cell. Idempotent."""

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    publish_sequence: int
    cell_id: int
    rendezvous: Rendezvous


class WaitCellReply(Message, frozen=True, kw_only=True, tag="WaitCellReply"):
    """Where each engine of the cell is."""

    phases: dict[str, CellPhase]
    details: dict[str, str]


class WaitCell(Message, frozen=True, kw_only=True, tag="WaitCell"):
    """Long poll until every engine of the cell is at `phase` or has failed."""

    reply: ClassVar[type[Message]] = WaitCellReply
    incarnation: int
    publish_sequence: int
    cell_id: int
    phase: CellPhase
    wait_s: float


class AbortCell(Message, frozen=True, kw_only=True, tag="AbortCell"):
    """Nothing (more) will be broadcast to this cell. Idempotent."""

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    publish_sequence: int
    cell_id: int
    reason: str


class EvaluationsReply(Message, frozen=True, kw_only=True, tag="EvaluationsReply"):
    """Results of finished evaluation rounds, oldest first."""

    results: list[EvalResult] = []


class WaitEvaluations(Message, frozen=True, kw_only=True, tag="WaitEvaluations"):
    """Long poll until more than `seen` evaluation rounds of the run have finished."""

    reply: ClassVar[type[Message]] = EvaluationsReply
    incarnation: int
    seen: int
    wait_s: float


class Leave(Message, frozen=True, kw_only=True, tag="Leave"):
    """A clean goodbye: claims are reissued, leases released at once."""

    reply: ClassVar[type[Message]] = Ok
    reason: str = ""


class Finish(Message, frozen=True, kw_only=True, tag="Finish"):
    """The trainer is done: tell everyone to stop. Idempotent."""

    reply: ClassVar[type[Message]] = Ok
    incarnation: int
    reason: str


class PeerView(Struct, frozen=True, kw_only=True):
    """One peer in the stats."""

    role: Role
    name: str
    heartbeat_age_s: float
    status: RoleStatus | None
    engines: list[EngineStatus] = []


class StatsReply(Message, frozen=True, kw_only=True, tag="StatsReply"):
    """Counters and peers, for the supervisor and for people."""

    tickets: int
    waiting: int
    claimed: int
    stored: int
    leased: int
    trained: int
    dropped: dict[DropReason, int]
    reissued: dict[str, int]
    policy_version: int
    live: WeightsName | None
    publish_sequence: int
    stored_bytes: int
    max_bytes: int
    peers: list[PeerView]
    finished: str = ""
    eval_tickets: int = 0
    """= evaluated + failed + open; in no figure above"""
    eval_evaluated: int = 0
    eval_failed: int = 0
    eval_open: int = 0


class Stats(Message, frozen=True, kw_only=True, tag="Stats"):
    """Read-only."""

    reply: ClassVar[type[Message]] = StatsReply


Request = (
    Hello
    | Claim
    | Credit
    | Insert
    | End
    | Evaluated
    | Watch
    | EnginePhase
    | GeneratorHeartbeat
    | StartTrainer
    | TrainerHeartbeat
    | Draw
    | Fetch
    | Ack
    | Settle
    | Announce
    | OpenCell
    | WaitCell
    | AbortCell
    | WaitEvaluations
    | Leave
    | Finish
    | Stats
)

Reply = (
    Ok
    | Error
    | HelloReply
    | ClaimReply
    | CreditReply
    | InsertReply
    | EndReply
    | WatchReply
    | StartTrainerReply
    | DrawReply
    | FetchReply
    | AnnounceReply
    | WaitCellReply
    | EvaluationsReply
    | StatsReply
)
