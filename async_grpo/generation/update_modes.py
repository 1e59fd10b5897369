"""Which pause mode an update uses. Pure: knows no engine and no clock.

`auto` weighs two costs. `retract` recomputes the KV of every request in flight, which takes time;
`in_place` takes none, but what follows was sampled from mixed KV, which no single policy
reproduces. So exactness is the default, and is given up only where it was measured to be dear.
"""

import re
from collections import deque

from async_grpo.config.generation import OnWeightUpdate
from async_grpo.engine_api import Load, PauseMode, ServerInfo

MAX_RECOMPUTE_SHARE = 0.05
"""Of the time between two updates; above it, recomputing is dear."""
NUM_MEASUREMENTS = 3
"""Retractions to measure before in_place is considered; the cheapest of the newest ones counts,
since a measurement can only be too high."""
MIN_MEASURED_TOKENS = 256
"""Below it, the probe's own latency would be taken for the cost of recomputing."""
SAFE_SGLANG = (0, 5, 23)
"""First version whose in_place updates are known to work, with one tensor-parallel rank and two."""


class RecomputeCost:
    """What recomputing KV costs on one engine, learned from its retractions."""

    def __init__(self) -> None:
        self._seconds_per_token: deque[float] = deque(maxlen=NUM_MEASUREMENTS)

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A retraction of `num_tokens` KV entries kept the engine busy for `seconds`."""
        if num_tokens >= MIN_MEASURED_TOKENS:
            self._seconds_per_token.append(seconds / num_tokens)

    def predicted_s(self, num_tokens: int) -> float | None:
        """Seconds to recompute `num_tokens`; None: not measured often enough."""
        if len(self._seconds_per_token) < NUM_MEASUREMENTS:
            return None
        return num_tokens * min(self._seconds_per_token)


def choose_mode(
    setting: OnWeightUpdate,
    *,
    info: ServerInfo,
    cost: RecomputeCost,
    num_kv_tokens: int | None,
    interval_s: float | None,
) -> PauseMode:
    """The mode of the next update of one engine.

    Args:
        setting: `generation.on_weight_update`.
        info: of the engine.
        cost: of recomputing on it.
        num_kv_tokens: KV entries of its requests in flight; None: the engine does not tell.
        interval_s: since its last update; None: there was none.
    """
    if setting is not OnWeightUpdate.auto:
        return PauseMode(setting.value)
    if num_kv_tokens is None or interval_s is None or not in_place_is_safe(info):
        return PauseMode.RETRACT
    predicted_s = cost.predicted_s(num_kv_tokens)
    if predicted_s is not None and predicted_s > MAX_RECOMPUTE_SHARE * interval_s:
        return PauseMode.IN_PLACE
    return PauseMode.RETRACT


def in_place_is_safe(info: ServerInfo) -> bool:
    """Whether updates of frozen requests are known to work on this server."""
    if info.engine == "embedded":
        return True
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", info.version)
    version = tuple(int(number) for number in numbers.groups()) if numbers else (0, 0, 0)
    return version >= SAFE_SGLANG and info.dp_size == info.pp_size == 1


def kv_tokens(load: Load) -> int:
    """KV entries that unfinished requests occupy."""
    return round(load.token_usage * load.max_total_num_tokens)
