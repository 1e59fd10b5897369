"""Messages of a generator: claims, inserts, endings, and what it must know of weight updates."""

from typing import ClassVar

from async_grpo.replay_api.base import Message, Ok
from async_grpo.replay_parts import (
    CellPhase,
    EndStats,
    EngineStatus,
    GroupSummary,
    RoleStatus,
    UpdateOrder,
    UpdateReport,
)
from async_grpo.types import DropReason, InsertOutcome, Ticket, WeightsName


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
    report: UpdateReport | None = None
    """of a commit"""


class GeneratorHeartbeat(Message, frozen=True, kw_only=True, tag="GeneratorHeartbeat"):
    """I live; these are my engines and my claims."""

    reply: ClassVar[type[Message]] = Ok
    engines: list[EngineStatus]
    claims: list[tuple[int, int]]
    status: RoleStatus
