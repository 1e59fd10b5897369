"""Messages of every peer: the handshake, the goodbye and the read-only view of the server."""

from typing import ClassVar

from async_grpo.replay_api.base import Message, Ok
from async_grpo.replay_parts import Dataset, EngineStatus, Role, RoleStatus, Struct
from async_grpo.types import DropReason, WeightsName


class HelloReply(Message, frozen=True, kw_only=True, tag="HelloReply"):
    """The server's side of the handshake."""

    incarnation: int
    """of the newest trainer; 0 before the first"""
    policy_version: int
    """train steps acked"""
    run_token: str
    """names the run's weights at engines; the same through restarts and resumes"""
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


class Leave(Message, frozen=True, kw_only=True, tag="Leave"):
    """A clean goodbye: claims are reissued, leases released at once."""

    reply: ClassVar[type[Message]] = Ok
    reason: str = ""


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
    pipeline_depth: int
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
