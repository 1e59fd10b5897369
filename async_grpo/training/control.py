"""What the figures of a train step change: pipeline depth, learning rate, whether to go on.

Pure, but for log lines: the trainer role carries out what is decided here. Alarms and the depth
controller share one depth; the controller stays below what an alarm has shrunk it to.
"""

import logging
from collections.abc import Mapping
from copy import deepcopy

import msgspec

from async_grpo.config.alarms import AlarmAction
from async_grpo.config.rules import least_depth
from async_grpo.config.schema import Config
from async_grpo.config.staleness import DEFAULT_TARGET_ESS, Controller
from async_grpo.training.alarms import AlarmEvent, Alarms, AlarmState, Change
from async_grpo.training.depth_controller import ControllerState, DepthController

logger = logging.getLogger(__name__)


class ControlState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of it. The depth itself is kept by the replay server's ledger."""

    alarms: dict[str, AlarmState] = {}
    controller: ControllerState | None = None
    ceiling: int | None = None
    """what alarms have shrunk the depth to"""
    shrink_pause: int = 0
    """steps until an alarm that lasts shrinks it again"""


class DepthChange(msgspec.Struct, frozen=True):
    """A depth to admit by."""

    depth: int
    reason: str


class Control:
    """One trainer's. Training thread only.

    Attributes:
        depth: pipeline_depth in force.
        stop_reason: why the run has to end; empty while it goes on.
    """

    def __init__(self, config: Config, depth: int, *, noise: float) -> None:
        """Of a trainer that starts.

        Args:
            config: of the run.
            depth: in force, as the replay server says.
            noise: mean |log-prob difference| by the trainer's own rounding, nats.
        """
        section, staleness = config.alarms, config.staleness
        self._alarms = Alarms(section, noise=noise)
        self._lr_factor, self._patience = section.lr_factor, section.patience
        self._low, self._high = least_depth(config), staleness.max_staleness
        self._configured = staleness.depth
        self._shrinks = bool(section.uses(AlarmAction.shrink_depth))
        self._controller: DepthController | None = None
        if staleness.controller is Controller.ess:
            self._controller = DepthController(staleness.target_ess or DEFAULT_TARGET_ESS)
        self._ceiling: int | None = None
        self._shrink_pause = 0
        self.depth = depth
        self.stop_reason = ""

    @property
    def wants_lags(self) -> bool:
        """Whether `step` reads `ess_by_lag`."""
        return self._controller is not None

    @property
    def lr_scale(self) -> float:
        """Factor of the next step's learning rate."""
        return self._lr_factor if self._alarms.active(AlarmAction.scale_lr) else 1.0

    def start(self) -> DepthChange | None:
        """What to set before the first step: a shrunk depth that nothing holds any more is undone.

        That is so when a run goes on with other alarms than it had.
        """
        if self._controller or self._shrinks or self.depth == self._configured:
            return None
        return self._move(self._configured, "as configured: neither controller nor alarm moves it")

    def step(
        self, values: Mapping[str, float], ess_by_lag: Mapping[int, tuple[int, float]]
    ) -> tuple[dict[str, float], DepthChange | None]:
        """Take in one train step; see `depth_controller.DepthController.step` for `ess_by_lag`.

        Returns:
            metrics of alarms and pacing, and the depth to set, if another.
        """
        change: DepthChange | None = None
        self._shrink_pause = max(0, self._shrink_pause - 1)
        for event in self._alarms.step(values):
            change = self._act(event) or change
        metrics = self._alarms.metrics() | {"alarm/active": len(self._alarms.active())}
        if self._controller is not None:
            controlled, pacing = self._ask_controller(self._controller, ess_by_lag)
            change, metrics = controlled or change, metrics | pacing
        return metrics | {"pacing/pipeline_depth": self.depth, "lr_scale": self.lr_scale}, change

    def _act(self, event: AlarmEvent) -> DepthChange | None:
        if event.action is AlarmAction.shrink_depth and event.change is not Change.OVER:
            return self._shrink(event)
        if event.change is Change.LASTS:
            return None
        if event.change is Change.OVER:
            logger.info("%s", event)
        elif event.action is AlarmAction.stop:
            self.stop_reason = self.stop_reason or f"{event} (alarms.{event.kind.name}_action=stop)"
        elif event.action is AlarmAction.scale_lr:
            logger.warning("%s; the learning rate is scaled by %g", event, self._lr_factor)
        else:
            logger.warning("%s", event)
        return None

    def _shrink(self, event: AlarmEvent) -> DepthChange | None:
        if self._shrink_pause:
            return None
        self._shrink_pause = self.depth + 1 + self._patience  # until the new depth can show
        if self.depth <= self._low:
            if event.change is Change.RAISED:
                logger.warning("%s; pipeline_depth is %d, the smallest", event, self.depth)
            return None
        self._ceiling = self.depth - 1
        logger.warning("%s; pipeline_depth %d -> %d", event, self.depth, self._ceiling)
        return self._move(self._ceiling, f"alarm {event.kind.name}")

    def _ask_controller(
        self, controller: DepthController, ess_by_lag: Mapping[int, tuple[int, float]]
    ) -> tuple[DepthChange | None, dict[str, float]]:
        high = self._high if self._ceiling is None else min(self._ceiling, self._high)
        before = self.depth
        decision = controller.step(before, ess_by_lag, low=self._low, high=high)
        if decision is None:
            return None, {}
        logger.info("pipeline_depth %d -> %d: %s", before, decision.depth, decision.reason)
        metrics: dict[str, float] = {"pacing/decision": decision.depth - before}
        if decision.fit is not None:
            metrics |= {
                "pacing/fit_intercept": decision.fit.intercept,
                "pacing/fit_slope": decision.fit.slope,
                "pacing/predicted_ess": decision.fit.ess(decision.depth),
            }
        if decision.depth == before:
            return None, metrics
        return self._move(decision.depth, decision.reason), metrics

    def _move(self, depth: int, reason: str) -> DepthChange:
        self.depth = depth
        return DepthChange(depth, reason)

    def snapshot(self) -> ControlState:
        """For a checkpoint."""
        return ControlState(
            alarms=self._alarms.snapshot(),
            controller=deepcopy(self._controller.state) if self._controller else None,
            ceiling=self._ceiling,
            shrink_pause=self._shrink_pause,
        )

    def restore(self, state: ControlState) -> None:
        """Go on from a checkpoint; what the configuration has no more is left out."""
        lasting = self._alarms.restore(state.alarms)
        if lasting:
            logger.info("alarms that last from before: %s", ", ".join(lasting))
        if self._controller is not None and state.controller is not None:
            self._controller.state = state.controller
        if self._shrinks:
            self._ceiling, self._shrink_pause = state.ceiling, state.shrink_pause
