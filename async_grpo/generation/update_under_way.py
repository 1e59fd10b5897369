"""What the driver knows of one engine's update while it goes on. No I/O."""

from dataclasses import dataclass
from pathlib import Path

from async_grpo.engine_api import PauseMode
from async_grpo.generation.engines import Engine
from async_grpo.interfaces import Clock
from async_grpo.replay_parts import UpdateOrder
from async_grpo.weights.receiver import WeightReceiver

Key = tuple[int, int]
"""(publish_sequence, cell_id)"""


class NotSent(Exception):  # noqa: N818 -- an outcome: the engine keeps its weights
    """The update ended before anything was sent."""


class Laps:
    """Seconds of the parts of one update, which follow each other."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._last = clock, clock()
        self.seconds: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """`part` ends now."""
        now = self._clock()
        self.seconds[part], self._last = now - self._last, now


@dataclass(frozen=True, slots=True)
class Update:
    """One engine's update."""

    engine: Engine
    order: UpdateOrder
    receiver: WeightReceiver
    mode: PauseMode
    num_kv_tokens: int | None
    """KV entries in use before it; None: not asked for, or not told"""
    directory: Path | None
    """with files to load; None: buckets will come"""
    laps: Laps

    @property
    def key(self) -> Key:
        """Of the order."""
        return (self.order.publish_sequence, self.order.cell_id)
