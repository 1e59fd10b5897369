"""Who is on which connection, and what each may ask.

A connection is opened by a valid hello and named by its ZeroMQ identity; one process (an instance)
has a control and a bulk connection. Knows nothing of sockets and of tickets.
"""

import math
from dataclasses import dataclass

from async_grpo.replay_api.base import WIRE_VERSION, Error, ErrorCode, Message
from async_grpo.replay_api.generator import (
    Claim,
    Credit,
    End,
    EnginePhase,
    Evaluated,
    GeneratorHeartbeat,
    Insert,
    Watch,
)
from async_grpo.replay_api.peers import Hello, Leave, Stats
from async_grpo.replay_api.protocol import Request
from async_grpo.replay_api.publishing import AbortCell, Announce, OpenCell, WaitCell
from async_grpo.replay_api.trainer import (
    Ack,
    Draw,
    Fetch,
    Finish,
    SetDepth,
    Settle,
    StartTrainer,
    TrainerHeartbeat,
    WaitEvaluations,
)
from async_grpo.replay_parts import Role

_EVERYONE: frozenset[type[Message]] = frozenset({Leave, Stats})
_ALLOWED: dict[Role, frozenset[type[Message]]] = {
    Role.GENERATOR: _EVERYONE
    | {Claim, Credit, Insert, End, Evaluated, Watch, EnginePhase, GeneratorHeartbeat},
    Role.TRAINER: _EVERYONE
    | {
        StartTrainer, TrainerHeartbeat, Draw, Fetch, Ack, Announce, OpenCell, WaitCell, AbortCell,
        WaitEvaluations, Settle, SetDepth, Finish,
    },
    Role.MONITOR: _EVERYONE,
}  # fmt: skip
_MAX_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Session:
    """One connection after its hello."""

    instance: str
    role: Role
    name: str


class Sessions:
    """All connections of one server."""

    def __init__(self, config_digest: str) -> None:
        self._digest = config_digest
        self._by_peer: dict[bytes, Session] = {}
        self._superseded: set[str] = set()
        self._met_workers = False

    def of(self, peer: bytes) -> Session | None:
        """The session on a connection; None before its hello."""
        return self._by_peer.get(peer)

    def refuse_hello(self, hello: Hello) -> Error | None:
        """Why this peer may not join; None: it may."""
        if hello.wire_version != WIRE_VERSION:
            return Error(
                code=ErrorCode.WIRE_MISMATCH,
                message=f"{hello.name} speaks wire version {hello.wire_version}, the replay server "
                f"{WIRE_VERSION}: run the same release of async_grpo everywhere",
            )
        if hello.config_digest != self._digest:
            return Error(
                code=ErrorCode.CONFIG_MISMATCH,
                message=f"{hello.name} was started from another configuration (digest "
                f"{hello.config_digest[:16]}) than the replay server ({self._digest}): start every "
                "role from the same file and overrides, or restart the replay server",
            )
        if not all(0 < len(text) <= _MAX_NAME_CHARACTERS for text in (hello.name, hello.instance)):
            return Error(
                code=ErrorCode.BAD_REQUEST, message="name or instance is empty or too long"
            )
        if hello.instance in self._superseded:
            return Error(
                code=ErrorCode.FENCED,
                message=f"another {hello.role} named {hello.name!r} has joined since: give each "
                "one its own name",
            )
        return None

    def open(self, peer: bytes, hello: Hello) -> list[str]:
        """Note an accepted hello; returns the instances that it ends.

        A newer instance of a name ends the one before it, except a trainer: which of two trainers
        goes on is decided by `StartTrainer`.
        """
        mine = Session(hello.instance, hello.role, hello.name)
        ended = []
        if hello.role is not Role.TRAINER:
            ended = [
                other.instance
                for other in set(self._by_peer.values())
                if (other.role, other.name) == (mine.role, mine.name) and other != mine
            ]
        for instance in ended:
            self.end(instance)
            self._superseded.add(instance)
        self._by_peer[peer] = mine
        self._met_workers |= hello.role is not Role.MONITOR
        return ended

    def end(self, instance: str) -> None:
        """Close both connections of a process; it has to say hello again."""
        self._by_peer = {
            peer: session for peer, session in self._by_peer.items() if session.instance != instance
        }

    def everyone_left(self) -> bool:
        """Whether generators or a trainer were here and none is any more."""
        return self._met_workers and all(
            session.role is Role.MONITOR for session in self._by_peer.values()
        )


def refuse(session: Session, request: Request, max_group_bytes: int) -> Error | None:
    """Why this peer may not ask this; None: it may. No role trusts another's numbers."""
    if type(request) not in _ALLOWED[session.role]:
        what = f"a {session.role} may not send {type(request).__name__}"
        return Error(code=ErrorCode.BAD_REQUEST, message=what)
    problem = ""
    if not math.isfinite(wait_s(request)):
        problem = "wait_s must be finite"
    elif isinstance(request, Credit) and not 0 < request.num_bytes <= max_group_bytes:
        problem = f"num_bytes must be > 0 and <= replay.max_group_bytes ({max_group_bytes})"
    elif isinstance(request, StartTrainer) and request.restored_version < 0:
        problem = "restored_version must be >= 0"
    elif isinstance(request, StartTrainer) and request.restored_incarnation < 0:
        problem = "restored_incarnation must be >= 0"
    elif isinstance(request, Insert) and (request.summary is not None or request.invalid):
        problem = "summary and invalid are the server's to fill in"
    elif isinstance(request, End | Evaluated):
        stats = request.stats
        if not math.isfinite(stats.reward_sum) or stats.num_completions < 0 or stats.num_tokens < 0:
            problem = "stats must be finite and >= 0"
    return Error(code=ErrorCode.BAD_REQUEST, message=problem) if problem else None


def wait_s(request: Request) -> float:
    """How long the peer is ready to wait; 0 for what is answered at once."""
    return getattr(request, "wait_s", 0.0)
