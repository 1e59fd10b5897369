"""Section `staleness`: how old trained tokens may be."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.config.ranges import not_negative

DEFAULT_TARGET_ESS = 0.8


class DrawOrder(StrEnum):
    """Which stored groups a draw takes first."""

    oldest_version = "oldest_version"
    completion = "completion"
    ticket = "ticket"


class OnStale(StrEnum):
    """What becomes of the prompt of a stale group."""

    drop = "drop"
    requeue = "requeue"


class OverAge(StrEnum):
    """What a token older than max_staleness does to its group."""

    reject = "reject"
    mask_tokens = "mask_tokens"


class Controller(StrEnum):
    """What moves pipeline_depth while the run goes on."""

    none = "none"
    ess = "ess"


@dataclass(kw_only=True)
class StalenessSection:
    """How old trained tokens may be."""

    max_staleness: int = 4
    """S: hard bound, in train steps, on train_version minus the version of the oldest token."""
    pipeline_depth: int | None = None
    """D: typical run-ahead, held by pacing; null: max_staleness // 2, at least 1 if S > 0."""
    draw_order: DrawOrder = DrawOrder.oldest_version
    """oldest_version (ties by ticket), completion, or ticket (no length bias, slower)."""
    over_age: OverAge = OverAge.reject
    """reject a group with a token older than max_staleness, or train it without such tokens
    (mask_tokens)."""
    min_fresh_fraction: float = 0.5
    """mask_tokens: a group is stale once less of its tokens than this may be trained."""
    on_stale: OnStale = OnStale.drop
    """drop the ticket of a stale group, or requeue its prompt as another attempt."""
    keep_weight_cap: float | None = None
    """null: off; else a trained group weighs min(1 / P(not stale), this), P by the length of its
    completions in the run so far, scaled to a mean of 1: undoes the bias to short completions."""
    controller: Controller = Controller.none
    """none, or ess: pipeline_depth is moved between weights.publish_every - 1 and max_staleness so
    that the effective sample size stays at target_ess (docs/alarms.md)."""
    target_ess: float | None = None
    """ess: of raw token weights at a staleness of pipeline_depth, as a fraction; null: 0.8."""
    force: int | None = None
    """k: train at staleness k exactly, for studies: pipeline_depth = k, oldest groups first, and a
    step waits until everything admitted is stored. The first k steps train at 0 to k - 1."""

    @property
    def depth(self) -> int:
        """The resolved pipeline_depth."""
        if self.force is not None:
            return self.force
        if self.pipeline_depth is not None:
            return self.pipeline_depth
        return max(self.max_staleness // 2, min(self.max_staleness, 1))

    @property
    def deepest(self) -> int:
        """The largest pipeline_depth that the run may come to."""
        return self.depth if self.controller is Controller.none else self.max_staleness

    @property
    def order(self) -> DrawOrder:
        """The resolved draw_order.

        Forced: by version. All groups of a version are there before the next, so tickets are in
        the same order, unless one was reopened and sampled again by later weights.
        """
        return self.draw_order if self.force is None else DrawOrder.oldest_version

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
        if not 0 < self.min_fresh_fraction <= 1:
            yield f"{where}.min_fresh_fraction must be in (0, 1], got {self.min_fresh_fraction}"
        if self.keep_weight_cap is not None and not self.keep_weight_cap > 1:
            yield f"{where}.keep_weight_cap must be > 1, got {self.keep_weight_cap}"
        yield from self._controller_problems(where)
        if self.force is not None:
            yield from self._force_problems(where, self.force)

    def _controller_problems(self, where: str) -> Iterator[str]:
        target = self.target_ess
        if self.controller is Controller.none:
            if target is not None:
                yield f"{where}.target_ess has no effect with {where}.controller=none"
            return
        if target is not None and not 0 < target < 1:
            yield f"{where}.target_ess must be between 0 and 1, got {target}"
        if self.force is not None:
            yield f"{where}.controller={self.controller} cannot move what {where}.force holds"
        elif not self.max_staleness:
            yield f"{where}.controller={self.controller} needs {where}.max_staleness > 0"

    def _force_problems(self, where: str, force: int) -> Iterator[str]:
        yield from not_negative(where, self, "force")
        if force > self.max_staleness:
            yield f"{where}.force ({force}) must be <= {where}.max_staleness ({self.max_staleness})"
        if self.pipeline_depth not in (None, force):
            yield (
                f"{where}.pipeline_depth ({self.pipeline_depth}) must be left out or equal "
                f"{where}.force ({force})"
            )
        if self.keep_weight_cap is not None:
            yield f"{where}.keep_weight_cap has no effect with {where}.force: no group grows stale"
        if self.draw_order is not DrawOrder.oldest_version:
            yield (
                f"{where}.draw_order={self.draw_order} has no effect with {where}.force: "
                "leave it out"
            )
