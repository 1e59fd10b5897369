"""Counts what the embedded engine does, for /metrics and /v1/loads. Knows no model and no queue.

Names are SGLang's, so that one dashboard serves both engines.
"""

import time
from collections.abc import Iterator

from async_grpo.engine_api import Load
from async_grpo.interfaces import Clock

THROUGHPUT_WINDOW_S = 1.0
"""Shortest time over which a rate is taken."""


class Telemetry:
    """Counters since the start, and the rate of sampling. Event-loop thread only."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.num_requests = 0
        self.num_aborted = 0
        self.num_retracted = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self._loads: dict[str, tuple[int, float]] = {}
        self._clock = clock
        self._mark = (clock(), 0)
        self._throughput = 0.0

    def finished(self, num_prompt_tokens: int, num_tokens: int, *, aborted: bool) -> None:
        """A request has been answered with `num_tokens`."""
        self.num_requests += 1
        self.num_aborted += aborted
        self.num_prompt_tokens += num_prompt_tokens
        self.num_generation_tokens += num_tokens

    def loaded(self, source: str, seconds: float) -> None:
        """Weights were loaded from `source`."""
        count, total = self._loads.get(source, (0, 0.0))
        self._loads[source] = (count + 1, total + seconds)

    def throughput(self, num_unfinished_tokens: int) -> float:
        """Tokens/s since the last call that was at least a window ago.

        Args:
            num_unfinished_tokens: sampled by requests that have not been answered.
        """
        since, before = self._mark
        now, sampled = self._clock(), self.num_generation_tokens + num_unfinished_tokens
        if now - since >= THROUGHPUT_WINDOW_S:
            self._throughput = max(0, sampled - before) / (now - since)
            self._mark = (now, sampled)
        return self._throughput

    def prometheus(self, model_name: str, load: Load, *, num_paused: int) -> str:
        """The exposition format, version 0.0.4."""
        label = f'model_name="{_escaped(model_name)}"'
        lines: list[str] = []
        for name, kind, value in self._series(load, num_paused):
            lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{{{label}}} {value}"]
        name = "sglang:weight_load_duration_seconds"
        lines.append(f"# TYPE {name} summary")
        for source, (count, seconds) in self._loads.items():
            labels = f'{{{label},source="{source}"}}'
            lines += [f"{name}_sum{labels} {seconds}", f"{name}_count{labels} {count}"]
        return "\n".join(lines) + "\n"

    def _series(self, load: Load, num_paused: int) -> Iterator[tuple[str, str, float]]:
        yield "num_running_reqs", "gauge", load.num_running_reqs
        yield "num_queue_reqs", "gauge", load.num_waiting_reqs
        yield "num_paused_reqs", "gauge", num_paused
        yield "token_usage", "gauge", load.token_usage
        yield "gen_throughput", "gauge", load.gen_throughput
        yield "prompt_tokens_total", "counter", self.num_prompt_tokens
        yield "generation_tokens_total", "counter", self.num_generation_tokens
        yield "num_requests_total", "counter", self.num_requests
        yield "num_aborted_requests_total", "counter", self.num_aborted
        yield "num_retracted_requests_total", "counter", self.num_retracted


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
