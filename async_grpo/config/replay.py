"""Section `replay`: the replay server."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.config.ranges import not_negative, positive


class Durability(StrEnum):
    """What an insert ack promises for the payload."""

    memory = "memory"


@dataclass(kw_only=True)
class ReplaySection:
    """The replay server."""

    address: str = "tcp://127.0.0.1:29571"
    """ZeroMQ address where all roles meet. Port 0: `run` lets the system choose."""
    groups_per_step: int = 16
    """P: groups of one train step."""
    max_bytes: int = 1 << 30
    """Limit of stored and leased payloads; a full buffer blocks producers."""
    max_groups: int = 0
    """Limit in groups; 0: (pipeline_depth + 1) * groups_per_step + one step."""
    max_group_bytes: int = 1 << 28
    """A larger group is refused as invalid."""
    credit_bytes: int = 1 << 28
    """Bytes of inserts that one generator may have unanswered."""
    durability: Durability = Durability.memory
    """memory: an ack means held in memory; after a restart of the server, stored groups are
    reissued and counted as lost."""
    heartbeat_s: float = 2.0
    """Interval of heartbeats."""
    peer_timeout_s: float = 6.0
    """A peer silent for this long is lost."""
    request_timeout_s: float = 10.0
    """One try of a request, on top of a long poll's own wait."""
    max_lost_claims: int = 3
    """After so many lost claims a ticket ends as generation_failed."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from positive(
            where, self, "groups_per_step", "max_bytes", "max_group_bytes", "credit_bytes",
            "heartbeat_s", "peer_timeout_s", "request_timeout_s", "max_lost_claims",
        )  # fmt: skip
        yield from not_negative(where, self, "max_groups")
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            yield (
                f"{where}.peer_timeout_s ({self.peer_timeout_s}) must be at least twice "
                f"{where}.heartbeat_s ({self.heartbeat_s}), or one late heartbeat loses a peer"
            )
        if not self.address.startswith(("tcp://", "ipc://")):
            yield f"{where}.address must start with tcp:// or ipc://, got {self.address!r}"
        elif self.address.startswith("tcp://") and not _has_port(self.address):
            yield f"{where}.address must end with a port of 0 to 65535, got {self.address!r}"


def _has_port(address: str) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return bool(host) and (port == "*" or (port.isdecimal() and int(port) <= 65535))
