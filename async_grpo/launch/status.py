"""The live status line of `run`: what the replay server and the step log say, every few seconds.

Reads only; a run does not depend on it.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.errors import PeerError
from async_grpo.interfaces import Clock
from async_grpo.replay_api.peers import PeerView, StatsReply
from async_grpo.replay_parts import EngineState, EngineStatus, Role, RoleStatus
from async_grpo.types import DropReason

_TAIL_BYTES = 65536


class Monitor(Protocol):
    """The replay server as an onlooker uses it."""

    async def connect(self) -> object:
        """Say hello."""
        ...

    async def stats(self) -> StatsReply:
        """Counters and peers."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


Show = Callable[[StatsReply, list[dict[str, Any]], float], None]
"""Gets the server's figures, the newest step lines and the seconds since the start."""


class StatusLine:
    """Prints one line every `launch.status_s`, or shows what it knows by `show` instead.

    Attributes:
        last_seen: role -> what it last said of itself; a role that has left is still here.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        open_monitor: Callable[[Config], Monitor],
        say: Callable[[str], None],
        clock: Clock = time.monotonic,
        show: Show | None = None,
    ) -> None:
        self._config = config
        self._directory = directory
        self._open_monitor = open_monitor
        self._say = say
        self._clock = clock
        self._started = clock()
        self._show = show
        self.last_seen: dict[str, RoleStatus] = {}
        self._said_errors: dict[str, str] = {}

    async def loop(self, address: str) -> None:
        """Print until cancelled; a silent server costs one line that says so."""
        settings = _at_address(self._config, address)
        monitor = self._open_monitor(settings)
        try:
            connected = False
            while True:
                await asyncio.sleep(self._config.launch.status_s)
                try:
                    async with asyncio.timeout(self._config.replay.request_timeout_s):
                        if not connected:
                            await monitor.connect()
                            connected = True
                        stats = await monitor.stats()
                except (PeerError, TimeoutError) as error:
                    self._say(f"{self._elapsed()} replay: no answer ({error or 'timeout'})")
                    continue
                self.last_seen |= {peer.name: peer.status for peer in stats.peers if peer.status}
                steps = read_metrics(self._directory.metrics, tail_bytes=_TAIL_BYTES)
                if self._show is not None:
                    self._show(stats, steps, self._clock() - self._started)
                    continue
                last_step = steps[-1] if steps else {}
                line = format_status(
                    stats,
                    last_step,
                    self._config.run.num_train_steps,
                    self._config.replay.heartbeat_s,
                )
                self._say(f"{self._elapsed()} {line}")
                self._say_new_errors()
        finally:
            await monitor.close()

    def _say_new_errors(self) -> None:
        """What went wrong in a role since the line before, each once."""
        for name, status in self.last_seen.items():
            error = " ".join(status.last_error.split())
            if error and error != self._said_errors.get(name):
                self._said_errors[name] = error
                self._say(f"{self._elapsed()} last error of {name}: {error}")

    def _elapsed(self) -> str:
        seconds = int(self._clock() - self._started)
        return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def format_status(
    stats: StatsReply, last_step: dict[str, Any], num_train_steps: int, heartbeat_s: float
) -> str:
    """One line: progress, the last step's figures, what each role does, the buffer."""
    parts = [f"step {stats.policy_version}/{num_train_steps}"]
    for label, name, form in (
        ("reward", "reward/mean", ".3f"),
        ("staleness", "staleness/mean", ".2f"),
    ):
        if (value := last_step.get(name)) is not None:
            parts.append(f"{label} {value:{form}}")
    for peer in sorted(stats.peers, key=lambda peer: (peer.role is not Role.TRAINER, peer.name)):
        if peer.status is None:
            continue
        rate = peer.status.metrics.get("tokens_per_s", 0.0)
        speed = f", {rate:,.0f} tokens/s" if rate else ""
        speed += f", {out}" if (out := engines_out(peer.engines)) else ""
        busy = utilization(peer.status)
        share = f" ({busy:.0%} busy)" if busy is not None else ""
        parts.append(f"{peer.name} {doing(peer, heartbeat_s)}{share}{speed}")
    mebibytes = stats.stored_bytes / 2**20
    parts.append(
        f"groups {stats.claimed} claimed, {stats.stored} stored ({mebibytes:.1f} MiB), "
        f"{stats.leased} leased, {dropped_groups(stats.dropped)}"
    )
    return " | ".join(parts)


def dropped_groups(dropped: Mapping[DropReason, int] | Mapping[str, int]) -> str:
    """How many groups ended untrained, and why, the most frequent reason first."""
    reasons = sorted(dropped.items(), key=lambda item: -item[1])
    why = ", ".join(f"{num_groups} {reason}" for reason, num_groups in reasons if num_groups)
    return f"{sum(dropped.values())} dropped" + (f" ({why})" if why else "")


_BUSY = ("working", "generating")


def doing(peer: PeerView, heartbeat_s: float) -> str:
    """What a role last said that it does, or for how long it has said nothing."""
    if peer.heartbeat_age_s >= 2 * heartbeat_s:
        return f"silent {peer.heartbeat_age_s:.0f} s"
    return peer.status.state if peer.status is not None else "starting"


def engines_out(engines: Sequence[EngineStatus]) -> str:
    """How many of a generator's engines cannot serve, or an empty string."""
    states = Counter(engine.state for engine in engines)
    parts = [
        f"{states[state]} of {len(engines)} engines {word}"
        for state, word in (
            (EngineState.DEAD, "given up"),
            (EngineState.QUARANTINED, "quarantined"),
        )
        if states[state]
    ]
    return ", ".join(parts)


def utilization(status: RoleStatus) -> float | None:
    """Share of the time since start-up that the role did its work; None before that."""
    past_start = sum(status.seconds.values()) - status.seconds.get("starting", 0.0)
    if past_start <= 0:
        return None
    return sum(status.seconds.get(state, 0.0) for state in _BUSY) / past_start


def read_metrics(path: Path, tail_bytes: int | None = None) -> list[dict[str, Any]]:
    """The step log's lines, oldest first; of a long one only those within the last `tail_bytes`.

    A line that is still being written is left out.
    """
    if not path.exists():
        return []
    with path.open("rb") as log:
        size = log.seek(0, 2)
        start = max(0, size - tail_bytes) if tail_bytes is not None else 0
        log.seek(start)
        lines = log.read().split(b"\n")
    whole = lines[1 if start else 0 : -1]  # what follows the last newline is not whole yet
    return [json.loads(line) for line in whole if line]


def _at_address(config: Config, address: str) -> Config:
    """`config` with the address that the replay server really listens on."""
    return replace(config, replay=replace(config.replay, address=address))
