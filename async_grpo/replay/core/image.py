"""Durable state as bytes and back: what a restart may begin from instead of the first record.

An image is no second truth. It equals the state after so many records, and only code that evolves
states exactly as the code that wrote it may read it; `fingerprint` tells.
"""

import hashlib
from collections import Counter, OrderedDict
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from async_grpo import replay_parts, types
from async_grpo.replay.core.accounting import Accounting
from async_grpo.replay.core.evaluation import EvalBook
from async_grpo.replay.core.leases import Leases
from async_grpo.replay.core.settings import CoreSettings
from async_grpo.replay.core.state import State
from async_grpo.replay.core.tickets import LastClaim, Phase, TicketBook, TicketState
from async_grpo.replay.core.versions import Versions
from async_grpo.replay_parts import Dataset


class _Image(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`State`, with each ticket once: the book names it in up to three places."""

    pipeline_depth: int
    tickets: list[TicketState]
    by_phase: dict[Phase, list[int]]
    ended: list[int]
    last_claims: dict[str, LastClaim]
    next_group_id: int
    num_stored: int
    num_forgotten: int
    versions: Versions
    leases: Leases
    accounting: Accounting
    evals: EvalBook
    dataset: Dataset | None
    run_token: str


def _decode_unknown(kind: Any, value: Any) -> Any:
    """A Counter, which msgspec does not know."""
    if get_origin(kind) is Counter:
        (key_kind,) = get_args(kind)
        return Counter({msgspec.convert(key, key_kind): count for key, count in value.items()})
    raise NotImplementedError(f"{kind} in an image")


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Image, dec_hook=_decode_unknown)


def encode_state(state: State) -> bytes:
    """The image of `state`."""
    book = state.book
    return _ENCODER.encode(
        _Image(
            pipeline_depth=state.pipeline_depth,
            tickets=list(book.tickets.values()),
            by_phase={phase: list(tickets) for phase, tickets in book.by_phase.items()},
            ended=list(book.ended),
            last_claims=book.last_claims,
            next_group_id=book.next_group_id,
            num_stored=book.num_stored,
            num_forgotten=book.num_forgotten,
            versions=state.versions,
            leases=state.leases,
            accounting=state.accounting,
            evals=state.evals,
            dataset=state.dataset,
            run_token=state.run_token,
        )
    )


def decode_state(image: bytes, settings: CoreSettings) -> State:
    """The state that `image` was made of, under settings of the same `fingerprint`.

    Raises:
        msgspec.MsgspecError: it is no image.
        KeyError: it names a ticket that it does not hold.
    """
    found = _DECODER.decode(image)
    tickets = {ticket.group_id: ticket for ticket in found.tickets}
    book = TicketBook(
        settings.remembered_tickets,
        tickets=tickets,
        by_phase={
            phase: {group_id: tickets[group_id] for group_id in group_ids}
            for phase, group_ids in found.by_phase.items()
        },
        ended=OrderedDict.fromkeys(found.ended),
        last_claims=found.last_claims,
        next_group_id=found.next_group_id,
        num_stored=found.num_stored,
        num_forgotten=found.num_forgotten,
    )
    return State(
        settings.seed,
        book,
        found.pipeline_depth,
        versions=found.versions,
        leases=found.leases,
        accounting=found.accounting,
        evals=found.evals,
        dataset=found.dataset,
        run_token=found.run_token,
    )


def fingerprint(settings: CoreSettings) -> str:
    """Equal for two processes that make equal states of equal records.

    It covers the source of everything that states are made of and changed by, and the settings that
    a new state begins with.
    """
    begins_with = (settings.seed, settings.remembered_tickets, settings.pipeline_depth)
    return hashlib.sha256(f"{_source_digest()}{begins_with}".encode()).hexdigest()


@cache
def _source_digest() -> str:
    digest = hashlib.sha256(msgspec.__version__.encode())
    sources = [*Path(__file__).parent.glob("*.py"), replay_parts.__file__, types.__file__]
    for source in sorted(str(each) for each in sources):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()
