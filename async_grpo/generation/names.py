"""What weights are called at an engine, and whose they are.

    quickstart-1f3a:generator/0:1.107        weights 1.107, brought by slot 0 of that generator
    quickstart-1f3a:generator/0:none         no weights yet; the slot holds the server
    ...:1.107?other-77c2:generator/0         the second slot asks whether the first one lives

A server has one name for its weights, and every reply carries it. So the name says who drives the
server: tokens under a name that somebody else has given are never believed, and a slot that finds
another's name asks before it touches the server (`claims`).
"""

import re
from collections import OrderedDict
from dataclasses import dataclass, replace

from async_grpo.errors import GenerationError
from async_grpo.types import WeightsName

REMEMBERED_NAMES = 256
"""Of these it is remembered what became of the KV; a request in flight spans far fewer."""
_NONE = "none"
_UNSAFE = re.compile(r"[^A-Za-z0-9_./-]+")


@dataclass(frozen=True, slots=True)
class Holder:
    """One engine slot of one run."""

    run: str
    slot: str

    @classmethod
    def of(cls, run: str, slot: str) -> "Holder":
        """Without the characters that separate parts of a name."""
        return cls(_UNSAFE.sub("_", run), _UNSAFE.sub("_", slot))

    def __str__(self) -> str:
        return f"{self.run}:{self.slot}"

    def told_to(self, other: "Holder") -> str:
        """For a message of `other`."""
        if self.run == other.run:
            return f"{self.slot} of this run ({self.run})"
        return f"run {self.run} ({self.slot}), this is run {other.run}"


@dataclass(frozen=True, slots=True)
class ServedName:
    """A `weight_version` of ours."""

    holder: Holder
    weights: WeightsName | None
    """None: none yet"""
    asked_by: Holder | None = None

    def __str__(self) -> str:
        question = f"?{self.asked_by}" if self.asked_by else ""
        return f"{self.holder}:{self.weights or _NONE}{question}"

    @property
    def unasked(self) -> "ServedName":
        """Without the question."""
        return replace(self, asked_by=None)

    @classmethod
    def parse(cls, text: str) -> "ServedName | None":
        """The name in `text`; None: nobody of ours has given it (`default`, for one)."""
        name, _, question = text.partition("?")
        run, _, rest = name.partition(":")
        slot, _, tail = rest.partition(":")
        weights = WeightsName.parse(tail)
        if not (run and slot) or (weights is None and tail != _NONE):
            return None
        asker, _, asking_slot = question.partition(":")
        asked_by = Holder(asker, asking_slot) if asker and asking_slot else None
        return cls(Holder(run, slot), weights, asked_by)


class UnknownWeights(GenerationError):  # noqa: N818 -- an outcome: says what the engine must get
    """Tokens were sampled under weights that this life of the engine was not given.

    Attributes:
        holder: who has given them; None: nobody of ours.
    """

    def __init__(self, message: str, holder: Holder | None = None) -> None:
        self.holder = holder
        super().__init__(message, retryable=True)


class GivenNames:
    """The weights that one life of an engine was given.

    Args:
        holder: the slot that drives it.
        initial: what the engine calls its weights until it is given some.
    """

    def __init__(self, holder: Holder, initial: str = "") -> None:
        self.holder = holder
        self._initial = initial
        self._kv_kept: OrderedDict[WeightsName, bool | None] = OrderedDict()

    def served(self, weights: WeightsName | None) -> str:
        """What the engine calls these weights; None: those before the first update."""
        return self._initial if weights is None else str(ServedName(self.holder, weights))

    def give(self, weights: WeightsName) -> None:
        """It is about to be sent these weights."""
        self._kv_kept.setdefault(weights, None)
        while len(self._kv_kept) > REMEMBERED_NAMES:
            self._kv_kept.popitem(last=False)

    def received(self, weights: WeightsName, *, kv_kept: bool) -> None:
        """It has them.

        Args:
            weights: given before.
            kv_kept: KV entries of the weights before, of requests or of cached prefixes, remain.
        """
        # the same weights may be sent again: then a yes stays a yes
        self._kv_kept[weights] = kv_kept or bool(self._kv_kept.get(weights))

    def keeps_kv(self, weights: WeightsName) -> bool:
        """Whether requests went on under `weights` with KV of the weights before.

        While they are on their way it counts as yes.

        Raises:
            UnknownWeights: they were not given.
        """
        if weights not in self._kv_kept:
            raise UnknownWeights(f"weights {weights} were not brought to this engine")
        return self._kv_kept[weights] is not False

    def read(self, text: str) -> WeightsName:
        """The weights that a reply names.

        Raises:
            UnknownWeights: this life of the engine was not given them; says whose they are.
        """
        found = ServedName.parse(text)
        if found is None:
            raise UnknownWeights(f"{text!r}, which run {self.holder.run} has not given it")
        if found.holder != self.holder:
            who = found.holder.told_to(self.holder)
            raise UnknownWeights(f"{text!r}: it is driven by {who}", found.holder)
        if found.weights is None or found.weights not in self._kv_kept:
            raise UnknownWeights(f"{text!r}, which this life of the engine was not given")
        return found.weights
