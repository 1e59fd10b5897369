"""Did the weights change, and do engines agree? Compared by checksum, over publishes. Pure.

A checksum that stays although the trainer's bytes changed is what a roll-back, a silent refusal or
a lost bucket looks like. It proves no fault (a small step may vanish in an engine's coarser dtype),
so it raises an alarm and fails nothing; that the engine computes what the trainer computes is the
probe's to prove.
"""

import logging
from dataclasses import dataclass

from async_grpo.types import WeightsName

logger = logging.getLogger(__name__)

_REMEMBERED = 1000
"""Engines; each start has an id of its own."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What an engine held after its last commit."""

    weights: WeightsName
    digest: str
    """of the trainer's bytes"""
    checksum: str
    """by the engine"""


class ArrivalWatch:
    """Remembers what each engine last held. One thread."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def check(
        self,
        weights: WeightsName,
        digest: str,
        checksums: dict[str, str],
        tp_sizes: dict[str, int],
    ) -> list[str]:
        """One line per alarm; each is logged.

        Args:
            weights: that were published.
            digest: of the trainer's bytes of them.
            checksums: engine_id -> checksum of those that committed; empty: it gives none.
            tp_sizes: engine_id -> ranks; only engines of one size can be compared.
        """
        alarms = []
        first: dict[int, str] = {}
        for engine_id, checksum in checksums.items():
            if not checksum:
                continue
            before = self._held.pop(engine_id, None)  # put back as the newest
            if before and before.digest != digest and before.checksum == checksum:
                alarms.append(
                    f"weights did not change: engine {engine_id} has checksum {checksum} with "
                    f"{weights} as with {before.weights}, though the trainer's weights differ"
                )
            other = first.setdefault(tp_sizes.get(engine_id, 1), engine_id)
            if checksums[other] != checksum:
                alarms.append(
                    f"engines disagree on {weights}: checksum {checksum} of {engine_id}, "
                    f"{checksums[other]} of {other}"
                )
            self._held[engine_id] = _Held(weights, digest, checksum)
        while len(self._held) > _REMEMBERED:
            del self._held[next(iter(self._held))]
        for line in alarms:
            logger.warning("%s", line)
        return alarms
