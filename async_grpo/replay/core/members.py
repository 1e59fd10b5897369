"""Members: who has said hello and what they last said of themselves. Volatile.

Only a hello and a heartbeat prove life: a parked request is applied again and again, also after
its sender has died.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from async_grpo.replay_parts import EngineState, EngineStatus, Role, RoleStatus
from async_grpo.types import WeightsName

_ROUTED = (EngineState.SYNCING, EngineState.SERVING, EngineState.PAUSED)


@dataclass(slots=True)
class Member:
    """One peer process."""

    instance: str
    role: Role
    name: str
    last_seen: float
    revision: int = 0
    """of what this generator watches"""
    engines: list[EngineStatus] = field(default_factory=list)
    claims: list[tuple[int, int]] = field(default_factory=list)
    status: RoleStatus | None = None

    def engine(self, engine_id: str) -> EngineStatus | None:
        """Its engine of that id."""
        return next((engine for engine in self.engines if engine.engine_id == engine_id), None)

    def has_weights(self, live: WeightsName) -> bool:
        """Whether one of its engines serves `live` or a later version of the same incarnation."""
        return any(
            engine.weights is not None
            and engine.state is not EngineState.DEAD
            and engine.weights.incarnation == live.incarnation
            and engine.weights.policy_version >= live.policy_version
            for engine in self.engines
        )

    def merge(self, heard: list[EngineStatus]) -> bool:
        """Take over a heartbeat's engines; returns whether anything differs.

        An engine's publish_sequence only grows, so a heartbeat that was sent before a commit we
        already know of does not take the weights back.
        """
        merged = []
        for status in heard:
            known = self.engine(status.engine_id)
            if (
                known is not None
                and status.weights is not None
                and not status.wants_sync
                and status.publish_sequence < known.publish_sequence
            ):
                status = msgspec.structs.replace(
                    status, weights=known.weights, publish_sequence=known.publish_sequence
                )
            merged.append(status)
        changed = merged != self.engines
        self.engines = merged
        return changed

    def commit(self, engine_id: str, weights: WeightsName, publish_sequence: int) -> None:
        """Its engine has confirmed these weights."""
        self.engines = [
            msgspec.structs.replace(
                engine, weights=weights, publish_sequence=publish_sequence, wants_sync=False
            )
            if engine.engine_id == engine_id and engine.publish_sequence <= publish_sequence
            else engine
            for engine in self.engines
        ]


def may_receive(engine: EngineStatus) -> bool:
    """Whether an update may be sent to this engine."""
    return engine.state in _ROUTED or (engine.wants_sync and engine.state is not EngineState.DEAD)


def needs_sync(engine: EngineStatus, announced: WeightsName | None) -> bool:
    """Whether it wishes weights, or missed the newest publish (its cell was given up)."""
    if engine.wants_sync:
        return engine.state is not EngineState.DEAD
    return (
        engine.state in _ROUTED
        and engine.weights is not None
        and announced is not None
        and engine.weights < announced
    )


@dataclass(slots=True)
class Members:
    """Peers by instance."""

    timeout_s: float
    by_instance: dict[str, Member] = field(default_factory=dict)

    def get(self, instance: str) -> Member | None:
        """The peer, if it has said hello and was not lost since."""
        return self.by_instance.get(instance)

    def join(self, instance: str, role: Role, name: str, now: float) -> list[Member]:
        """A hello; returns the members that it ends: other instances of the same name.

        A second trainer ends nobody: it has to wait until the first one is silent.
        """
        ended = [
            member
            for member in self.by_instance.values()
            if (member.role, member.name) == (role, name)
            and member.instance != instance
            and role is not Role.TRAINER
        ]
        for member in ended:
            del self.by_instance[member.instance]
        known = self.by_instance.get(instance)
        if known is not None:
            known.last_seen = now
        else:
            self.by_instance[instance] = Member(instance, role, name, now)
        return ended

    def remove(self, instance: str) -> None:
        """The peer is gone."""
        del self.by_instance[instance]

    def is_alive(self, instance: str, now: float) -> bool:
        """Whether the peer was heard of within the timeout."""
        member = self.by_instance.get(instance)
        return member is not None and now - member.last_seen <= self.timeout_s

    def silent(self, now: float) -> list[Member]:
        """Peers not heard of within the timeout; a monitor sends no heartbeats."""
        return [
            member
            for member in self.by_instance.values()
            if now - member.last_seen > self.timeout_s and member.role is not Role.MONITOR
        ]

    def engines(self) -> Iterator[tuple[Member, EngineStatus]]:
        """All engines of all generators, by engine_id."""
        pairs = [
            (engine.engine_id, member, engine)
            for member in self.by_instance.values()
            for engine in member.engines
        ]
        for _, member, engine in sorted(pairs, key=lambda pair: pair[0]):
            yield member, engine

    def receivers(self) -> list[tuple[str, EngineStatus]]:
        """(generator, engine) that a publish to all is sent to."""
        return [(member.name, engine) for member, engine in self.engines() if may_receive(engine)]
