"""What became of one announcement, for logs and metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from async_grpo.replay_parts import UpdateReport
from async_grpo.types import WeightsName


@dataclass(frozen=True, slots=True)
class PublishResult:
    """What became of one announcement."""

    weights: WeightsName
    num_cells: int
    failures: list[str]
    """one line per cell that did not commit as a whole"""
    seconds: float
    reports: Sequence[UpdateReport] = ()
    """of the engines that committed"""
    alarms: list[str] = field(default_factory=list)
    """weights that did not change though they should have, or differ between engines"""

    def metrics(self) -> dict[str, float]:
        """Rows of `metrics.registry`: means over engines, gaps as the worst of them."""
        values: dict[str, float] = {
            "sync/failed_cells": len(self.failures),
            "sync/alarms": len(self.alarms),
        }
        if self.num_cells and not self.failures:
            values["sync/publish_s"] = self.seconds
        if not self.reports:
            return values
        count = len(self.reports)
        values["sync/probe_gap"] = max(report.probe_gap for report in self.reports)
        values["sync/probe_gap_max"] = max(report.probe_gap_max for report in self.reports)
        values["sync/pause_s"] = sum(sum(r.seconds.values()) for r in self.reports) / count
        for part in ("begin", "go", "receive", "verify", "probe"):
            total = sum(report.seconds.get(part, 0.0) for report in self.reports)
            values[f"sync/pause_{part}_s"] = total / count
        return values
