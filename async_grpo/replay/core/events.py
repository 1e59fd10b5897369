"""What goes into the replay core and what comes out.

`ReplayCore.apply(event, now) -> Effects` decides; its `records` are the only thing that changes
durable state, so a core rebuilt from the ledger's records equals the one that wrote them.
"""

from dataclasses import dataclass, field
from typing import Any

from async_grpo.replay_api.protocol import Reply, Request
from async_grpo.replay_parts import Dataset, Role


@dataclass(slots=True, frozen=True)
class Joined:
    """A peer said a valid hello; another instance of the same (role, name) has ended."""

    peer: str
    """the instance"""
    role: Role
    name: str
    dataset: Dataset | None = None
    new_token: str = ""
    """the run's, if it has none yet"""


@dataclass(slots=True, frozen=True)
class Received:
    """A request arrived from a peer that has said hello."""

    peer: str
    request: Request


@dataclass(slots=True, frozen=True)
class Tick:
    """Time passed: heartbeat losses and group deadlines take effect."""


Event = Joined | Received | Tick


@dataclass(slots=True)
class Effects:
    """Outcome of one event."""

    reply: Reply | None = None
    """None for a `Received` long poll: nothing to say yet; the server parks the request, applies it
    again after each later change, and at its deadline sends `core.empty_reply(request, peer)`"""
    records: list[Any] = field(default_factory=list)
    """`records.Record`s for the ledger, to be written before the reply is sent"""
    freed: list[tuple[int, int]] = field(default_factory=list)
    """(group_id, attempt) whose payload may be forgotten"""
    changed: bool = False
    """parked requests are worth another try"""
    silent: list[str] = field(default_factory=list)
    """names of peers that were given up"""
