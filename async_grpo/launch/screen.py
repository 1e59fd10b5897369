"""The live screen of `run` at a terminal: one picture of the run, in 80 columns by 24 rows.

Draws what it is given. Knows no connection, no file and no process.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from async_grpo.launch.standard_streams import heard_or_not
from async_grpo.launch.status import doing, dropped_groups, engines_out, utilization
from async_grpo.launch.supervisor import REPLAY
from async_grpo.replay_api.peers import PeerView, StatsReply
from async_grpo.replay_parts import Role

_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_NUM_REWARDS = 40
_MAX_ROLES = 8
_STEPS_FOR_ETA = 20


@dataclass(frozen=True)
class Picture:
    """What is known of a run at one moment."""

    stats: StatsReply
    steps: Sequence[Mapping[str, Any]]
    """the newest lines of metrics.jsonl, oldest first"""
    num_train_steps: int
    max_staleness: int
    elapsed_s: float
    heartbeat_s: float
    """a role that says nothing for twice as long is silent"""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """role -> times it was started again"""


def draw(picture: Picture) -> RenderableType:
    """The whole screen."""
    return Group(
        _progress(picture), _learning(picture), _speed(picture), _buffer(picture), Text(),
        _roles(picture), Text("Ctrl-C ends the run in order; a second one at once", style="dim"),
    )  # fmt: skip


def clock_text(seconds: float) -> str:
    """h:mm:ss."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def eta_s(picture: Picture) -> float | None:
    """Seconds to the last step at the pace of the last steps; None before there is a pace."""
    recent = picture.steps[-_STEPS_FOR_ETA - 1 :]
    if len(recent) < 2:
        return None
    spent_s = float(recent[-1]["time/wall_s"]) - float(recent[0]["time/wall_s"])
    left = max(0, picture.num_train_steps - picture.stats.policy_version)
    return max(0.0, spent_s) / (len(recent) - 1) * left


def sparkline(values: Sequence[float]) -> str:
    """One character per value, from the lowest to the highest of them."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _bar(share: float, width: int = 20) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return f"[{'#' * full}{'.' * (width - full)}]"


def _line(label: str, text: str) -> Text:
    return Text.assemble((f"{label:<11}", "dim"), text, no_wrap=True, overflow="ellipsis")


def _progress(picture: Picture) -> Text:
    done, total = picture.stats.policy_version, picture.num_train_steps
    left_s = eta_s(picture)
    left = "" if left_s is None else f", {clock_text(left_s)} left"
    text = f"{done}/{total} {_bar(done / total)} {done / total:.0%}"
    return _line("step", f"{text}  {clock_text(picture.elapsed_s)} so far{left}")


def _learning(picture: Picture) -> RenderableType:
    rewards = [step["reward/mean"] for step in picture.steps if step.get("reward/mean") is not None]
    if not rewards:
        return _line("reward", "no step yet")
    last = picture.steps[-1]
    shown = rewards[-_NUM_REWARDS:]
    text = f"{shown[-1]:.3f}  {sparkline(shown)}  {min(shown):.3f} to {max(shown):.3f}"
    mean, most = last.get("staleness/mean"), last.get("staleness/max")
    stale = "-" if mean is None else f"{mean:.2f} mean, {most or 0:g} at most"
    bound = f"{stale} in the last step; bound {picture.max_staleness} train steps"
    return Group(_line("reward", text), _line("staleness", bound))


def _speed(picture: Picture) -> RenderableType:
    sampled = sum(
        peer.status.metrics.get("tokens_per_s", 0.0)
        for peer in picture.stats.peers
        if peer.status is not None and peer.role is Role.GENERATOR
    )
    trained = picture.steps[-1].get("tokens/trained_per_s", 0.0) if picture.steps else 0.0
    out = [
        f"{peer.name}: {text}"
        for peer in picture.stats.peers
        if (text := engines_out(peer.engines))
    ]
    rates = _line("tokens/s", f"{sampled:,.0f} sampled, {trained:,.0f} trained")
    return Group(rates, _line("engines", "; ".join(out))) if out else rates


def _buffer(picture: Picture) -> RenderableType:
    stats = picture.stats
    share = stats.stored_bytes / stats.max_bytes if stats.max_bytes else 0.0
    groups = f"{stats.claimed} claimed, {stats.stored} stored, {stats.leased} leased"
    return Group(
        _line("groups", f"{groups}; {stats.trained} trained, {dropped_groups(stats.dropped)}"),
        _line("buffer", f"{_bar(share)} {share:.0%} of {stats.max_bytes / 2**20:,.0f} MiB"),
    )


def _roles(picture: Picture) -> Table:
    """A row per role; below it the last thing that went wrong there."""
    table = Table(box=None, pad_edge=False, expand=True, padding=(0, 2, 0, 0))
    table.add_column("role", no_wrap=True, style="bold", max_width=24)
    table.add_column("state", no_wrap=True, max_width=12)
    for name in ("busy", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("last error", no_wrap=True, overflow="ellipsis", ratio=1)
    peers = {peer.name: peer for peer in picture.stats.peers if peer.role is not Role.MONITOR}
    names = sorted({*peers, *picture.restarts}, key=lambda name: (name != "trainer", name))
    for name in names[:_MAX_ROLES]:
        peer = peers.get(name)
        cells = _cells(name, peer, picture.heartbeat_s)
        table.add_row(name, *cells, str(picture.restarts.get(name, 0)), _error(peer))
    if len(names) > _MAX_ROLES:
        table.add_row(f"and {len(names) - _MAX_ROLES} more", "", "", "", "")
    return table


def _cells(name: str, peer: PeerView | None, heartbeat_s: float) -> tuple[str, str]:
    if name == REPLAY:
        return "serving", "-"  # it has just answered
    if peer is None:
        return "away", "-"
    share = utilization(peer.status) if peer.status is not None else None
    return doing(peer, heartbeat_s), "-" if share is None else f"{share:.0%}"


def _error(peer: PeerView | None) -> str:
    error = peer.status.last_error if peer is not None and peer.status is not None else ""
    return " ".join(error.split()) or "none"


class Screen:
    """The picture at the bottom of a terminal; what is printed meanwhile scrolls above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._live = Live(
            Text("starting"), console=console, auto_refresh=False, vertical_overflow="crop"
        )

    def __enter__(self) -> Self:
        with heard_or_not(sys.stdout):
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with heard_or_not(sys.stdout):
            self._live.stop()

    def show(self, picture: Picture) -> None:
        """Draw it in place of the one before."""
        with heard_or_not(sys.stdout):
            self._live.update(draw(picture), refresh=True)
