"""Did every tensor arrive, and nothing else? Compared by checksum, over publishes. No I/O.

The bytes of an engine's tensor are a function of the bytes that the trainer sent for it. So equal
digests at the trainer mean equal checksums at the engine, and different ones different ones. A
tensor that keeps its checksum while the trainer's bytes changed was left out, or rolled back; one
that has another checksum than before, or than another engine has, for the same bytes was damaged.
Either is found however little it moves log-probs.

A weight that is wrong in a new way each time, under new bytes, is the probe's to find. Where an
engine stores less than it is sent (a coarser dtype, a quantized format), a small step may vanish:
then the first kind proves no fault.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from async_grpo.config.policy import DType
from async_grpo.engine_api import Checksums, ServerInfo
from async_grpo.errors import WeightSyncError
from async_grpo.replay_parts import UpdateOrder
from async_grpo.weights.plan import ITEM_BYTES
from async_grpo.weights.server_names import parts_of

logger = logging.getLogger(__name__)

WHOLE = "all weights"
"""Name under which an engine is compared that lists no tensors."""
_Kind = tuple[str, str, int, str]
"""Engines that store equal bytes alike: program, version, ranks, dtype."""
_NAMED = 3
"""Tensors that a message lists."""
_REMEMBERED = 4
"""Newest contents of each tensor, besides the first: an engine starts with the initial weights."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One tensor of an engine that is not what the trainer's bytes make of it."""

    name: str
    """as the engine calls it"""
    did_not_arrive: bool
    """it is as it was with other bytes of the trainer's; else it is another than with the same"""
    before: str
    """weights whose publish it is compared with"""

    def __str__(self) -> str:
        if self.did_not_arrive:
            return f"{self.name} is as with weights {self.before}, though the trainer's differs"
        return f"{self.name} is not as with weights {self.before}, though the trainer's is"


@dataclass(frozen=True, slots=True)
class _Held:
    """What a tensor was."""

    weights: str
    digest: tuple[int, ...]
    """of the trainer's bytes of its parts"""
    checksum: str
    """by the engine"""


class ArrivalWatch:
    """What the tensors of engines of one kind were, by what the trainer's were.

    Engines of one kind store equal bytes as equal bytes: same program and version, ranks and dtype.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[_Held]] = {}

    def check(
        self, weights: str, digests: Mapping[str, int], found: Checksums, *, exact: bool = True
    ) -> list[Fault]:
        """Faults of an engine that received `weights`; nothing is remembered.

        Args:
            weights: their name.
            digests: trainer's name of a tensor -> digest of its bytes.
            found: by the engine.
            exact: it stores all that it is sent. If not, tensors that stayed are only a fault where
                all have: small steps vanish in some.
        """
        contents = list(_contents(weights, digests, found))
        faults = list(self._faults(contents))
        stayed = [fault for fault in faults if fault.did_not_arrive]
        if not exact and len(stayed) < len(contents):
            return [fault for fault in faults if not fault.did_not_arrive]
        return faults

    def remember(self, weights: str, digests: Mapping[str, int], found: Checksums) -> None:
        """These are in, and right."""
        for name, now in _contents(weights, digests, found):
            held = self._held.setdefault(name, [])
            if all((each.digest, each.checksum) != (now.digest, now.checksum) for each in held):
                held.append(now)
                del held[1:-_REMEMBERED]

    def _faults(self, contents: Iterable[tuple[str, _Held]]) -> Iterable[Fault]:
        for name, now in contents:
            for held in reversed(self._held.get(name, [])):
                if (held.digest == now.digest) != (held.checksum == now.checksum):
                    yield Fault(name, held.digest != now.digest, held.weights)
                    break


def _contents(
    weights: str, digests: Mapping[str, int], found: Checksums
) -> Iterable[tuple[str, _Held]]:
    """Of each tensor of the engine that is made of sent ones; else of the whole."""
    made_of = parts_of(digests, found.tensors)
    for name, parts in made_of.items():
        digest = tuple(digests[part] for part in parts)
        yield name, _Held(weights, digest, found.tensors[name])
    if not made_of and digests:
        yield WHOLE, _Held(weights, tuple(digests.values()), found.total)


def stores_exactly(info: ServerInfo, found: Checksums, sent: DType) -> bool:
    """Whether an engine keeps every bit that it is sent, as far as it tells.

    Args:
        info: of the engine.
        found: its tensors: scales are those of a quantized format.
        sent: dtype of the policy.
    """
    known = ITEM_BYTES.get(info.dtype, 0)  # "auto" tells nothing
    return known >= ITEM_BYTES[sent.value] and not any("scale" in name for name in found.tensors)


class Arrivals:
    """The watch of one generator over all of its engines. One thread.

    Args:
        dtype: of the policy.
        fatal: a fault that cannot be an engine's coarser format fails the update.
    """

    def __init__(self, dtype: DType, *, fatal: bool) -> None:
        self._dtype, self._fatal = dtype, fatal
        self._incarnation = 0
        self._watches: dict[_Kind, ArrivalWatch] = {}

    def check(
        self, engine_id: str, info: ServerInfo, order: UpdateOrder, found: Checksums
    ) -> list[str]:
        """Compare what an engine holds after an update with what its kind held before.

        Returns:
            What is odd, but fails no update; logged.

        Raises:
            WeightSyncError: a tensor did not arrive, or was damaged.
        """
        weights = str(order.weights)
        if order.weights.incarnation != self._incarnation:  # digests are of one trainer's life
            self._incarnation = order.weights.incarnation
            self._watches.clear()
        kind = (info.engine, info.version, info.tp_size, info.dtype)
        watch = self._watches.setdefault(kind, ArrivalWatch())
        exact = stores_exactly(info, found, self._dtype)
        faults = watch.check(weights, order.digests, found, exact=exact)
        if not faults:
            watch.remember(weights, order.digests, found)
            return []
        more = f" (and {len(faults) - _NAMED} more)" if len(faults) > _NAMED else ""
        text = "; ".join(str(fault) for fault in faults[:_NAMED]) + more
        if self._fatal and (exact or any(not fault.did_not_arrive for fault in faults)):
            raise WeightSyncError(engine_id, weights, "checksum", text)
        line = f"engine {engine_id} with {weights}: {text}"
        logger.warning("%s", line)
        return [line]


def disagreements(checksums: Mapping[str, str], tp_sizes: Mapping[str, int]) -> list[str]:
    """Engines of one publish whose weights differ, one line each.

    Args:
        checksums: engine_id -> checksum over all weights; empty: it gives none.
        tp_sizes: engine_id -> ranks; only engines of one size can be compared.
    """
    first: dict[int, str] = {}
    lines = []
    for engine_id, checksum in checksums.items():
        if not checksum:
            continue
        other = first.setdefault(tp_sizes.get(engine_id, 1), engine_id)
        if checksums[other] != checksum:
            lines.append(
                f"engines disagree: checksum {checksum} of {engine_id}, {checksums[other]} of "
                f"{other}"
            )
    return lines
