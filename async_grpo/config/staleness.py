"""Section `staleness`: how old trained tokens may be."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.config.ranges import not_negative


class DrawOrder(StrEnum):
    """Which stored groups a draw takes first."""

    oldest_version = "oldest_version"
    completion = "completion"
    ticket = "ticket"


class OnStale(StrEnum):
    """What becomes of the prompt of a stale group."""

    drop = "drop"
    requeue = "requeue"


@dataclass(kw_only=True)
class StalenessSection:
    """How old trained tokens may be."""

    max_staleness: int = 4
    """S: hard bound, in train steps, on train_version minus the version of the oldest token."""
    pipeline_depth: int | None = None
    """D: typical run-ahead, held by pacing; null: max_staleness // 2, at least 1 if S > 0."""
    draw_order: DrawOrder = DrawOrder.oldest_version
    """oldest_version (ties by ticket), completion, or ticket (no length bias, slower)."""
    on_stale: OnStale = OnStale.drop
    """drop the ticket of a stale group, or requeue its prompt as another attempt."""

    @property
    def depth(self) -> int:
        """The resolved pipeline_depth."""
        if self.pipeline_depth is not None:
            return self.pipeline_depth
        return max(self.max_staleness // 2, min(self.max_staleness, 1))

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from not_negative(where, self, "max_staleness")
        if self.pipeline_depth is not None:
            yield from not_negative(where, self, "pipeline_depth")
            if self.pipeline_depth > self.max_staleness:
                yield (
                    f"{where}.pipeline_depth ({self.pipeline_depth}) must be <= "
                    f"{where}.max_staleness ({self.max_staleness})"
                )
