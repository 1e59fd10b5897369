"""Weight updates of one engine by the code of a run, without a replay server and a generator.

The publisher is the trainer's, the driver the generator's; `matchmaker` stands between them. The
probe allows any difference and checksums are only told, so that an engine with wrong weights stays
to be examined. Knows no check.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_grpo.config.generation import OnWeightUpdate
from async_grpo.config.weights import Transport
from async_grpo.doctor.matchmaker import Matchmaker
from async_grpo.doctor.subject import Subject
from async_grpo.doctor.two_policies import Which
from async_grpo.engine_api import PauseMode
from async_grpo.errors import WeightSyncError
from async_grpo.generation.weight_driver import WeightDriver
from async_grpo.types import WeightsName
from async_grpo.weights.backend import settings_in_force
from async_grpo.weights.publisher import WeightPublisher

logger = logging.getLogger(__name__)

_INCARNATION = 0
"""No trainer ever has it, so a run believes nothing of what was sampled under these names."""
_FIRST_VERSION = 1


@dataclass(frozen=True, slots=True)
class Sent:
    """One update that the engine took."""

    weights: WeightsName
    checksum: str
    """empty: the engine gives none"""
    alarms: list[str]
    """what the checksums of its tensors show"""
    kv_kept: bool
    """the engine refused to drop cached KV, or was not asked to"""
    seconds: float


class WeightLink:
    """Sends either policy to the subject's engine. Use it on one event loop."""

    def __init__(self, subject: Subject) -> None:
        config, engine = subject.config, subject.engine
        self._subject, self._engine = subject, engine
        self._version = _FIRST_VERSION
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()

        def call(work: Coroutine[Any, Any, Any], /) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        run_directory = Path(config.run.output_dir)
        self._directory = _directory_beside(
            Path(config.weights.directory or run_directory / "weights")
        )
        device = subject.policies.model.device
        settings = replace(settings_in_force(config, device), check_arrival=False)
        if Transport.disk in settings.transports():
            settings = replace(settings, directory=str(self._directory))
        self._matchmaker = Matchmaker(engine)
        self._publisher = WeightPublisher(
            self._matchmaker, call, settings, run_directory=run_directory, device=device
        )
        self._drivers = {
            mode: WeightDriver(
                self._matchmaker,
                lambda: [engine],
                self._spawn,
                settings,
                on_weight_update=OnWeightUpdate(mode.value),
                dtype=config.policy.dtype,
            )
            for mode in (PauseMode.RETRACT, PauseMode.IN_PLACE)
        }

    async def send(self, which: Which, mode: PauseMode) -> Sent:
        """One whole update; then the subject's weights are these.

        Raises:
            WeightSyncError: it failed. The weights of the engine are not known any more.
        """
        subject, started = self._subject, time.monotonic()
        weights = WeightsName(_INCARNATION, self._version)
        self._version += 1
        self._matchmaker.on_orders = self._drivers[mode].on_orders
        subject.weights = None

        def publish() -> None:
            subject.policies.use(which)
            self._publisher.publish(weights, subject.policies.source)
            self._publisher.wait()

        try:
            await asyncio.to_thread(publish)
        finally:
            self._matchmaker.end()
            await asyncio.gather(*self._tasks)
        result = self._publisher.last_result
        assert result is not None, "a publish has a result"
        if result.failures:
            # the engine's end knows the call that failed; the other only that nothing came of it
            reason = self._drivers[mode].last_error or "; ".join(result.failures)
            raise WeightSyncError(subject.url, str(weights), "publish", reason)
        subject.weights, subject.which = weights, which
        return Sent(
            weights,
            self._engine.checksum,
            result.alarms,
            self._engine.names.keeps_kv(weights),
            time.monotonic() - started,
        )

    async def close(self) -> None:
        """Free both ends. The engine keeps its weights, and is not left in an update."""
        for driver in self._drivers.values():
            driver.close()
        await asyncio.to_thread(self._publisher.close)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _directory_beside(directory: Path) -> Path:
    """The run's own directory of weights is not touched: the publisher deletes what it finds."""
    return directory.with_name(f"{directory.name}-doctor")
