"""The ledger's records: facts that change durable state, one JSON line each.

A record says what happened, never why the core allowed it; `state.State.evolve` is the only reader
that acts on it. Any prefix of a ledger is a valid state: each record is atomic by itself.
"""

from typing import Any

import msgspec

from async_grpo.replay_parts import Cell, EndStats, GeneratedStats, GroupSummary, LeasedGroup
from async_grpo.types import DropReason, ReissueReason, TicketKind, WeightsName


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records; the class name is the tag."""


class RunNamed(_Record, frozen=True, kw_only=True, tag="RunNamed"):
    """The run has a token, which names its weights at engines. Once, before anything is told."""

    token: str


class DatasetAgreed(_Record, frozen=True, kw_only=True, tag="DatasetAgreed"):
    """The first generator named the dataset; all others must have the same one."""

    fingerprint: str
    num_prompts: int


class Made(_Record, frozen=True, kw_only=True, tag="Made"):
    """A new ticket, waiting, at attempt 1."""

    group_id: int
    prompt_index: int
    kind: TicketKind


class Claimed(_Record, frozen=True, kw_only=True, tag="Claimed"):
    """A waiting ticket was handed to a generator, in answer to its claim `number`."""

    group_id: int
    attempt: int
    instance: str
    generator: str
    number: int


class Stored(_Record, frozen=True, kw_only=True, tag="Stored"):
    """The payload of a claimed attempt is held."""

    summary: GroupSummary


class Dropped(_Record, frozen=True, kw_only=True, tag="Dropped"):
    """The ticket ended untrained."""

    group_id: int
    attempt: int
    reason: DropReason
    detail: str = ""
    stats: EndStats = EndStats()
    """of a group that ended without being stored"""


class Reissued(_Record, frozen=True, kw_only=True, tag="Reissued"):
    """`attempt` is over; the ticket waits as attempt + 1."""

    group_id: int
    attempt: int
    reason: ReissueReason
    stats: EndStats = EndStats()
    """of a finished group that was not stored"""


class Drawn(_Record, frozen=True, kw_only=True, tag="Drawn"):
    """Stored groups are leased to the trainer."""

    incarnation: int
    draw_number: int
    train_version: int
    groups: list[LeasedGroup]
    generated: GeneratedStats


class Released(_Record, frozen=True, kw_only=True, tag="Released"):
    """The groups of a draw are stored again."""

    incarnation: int
    draw_number: int


class Trained(_Record, frozen=True, kw_only=True, tag="Trained"):
    """Step `step` was applied with these (group_id, attempt); policy_version is step + 1."""

    incarnation: int
    step: int
    draw_number: int
    groups: list[tuple[int, int]]


class Settled(_Record, frozen=True, kw_only=True, tag="Settled"):
    """Steps before `policy_version` are final: no checkpoint that is kept could undo them."""

    incarnation: int
    policy_version: int


class TrainerStarted(_Record, frozen=True, kw_only=True, tag="TrainerStarted"):
    """A trainer took over at `restored_version`.

    All leases are released; the tickets of every trained step >= restored_version reopen as
    attempt + 1 (`rolled_back`); nothing is live until that version is published.
    """

    incarnation: int
    restored_version: int
    restored_incarnation: int = 0
    """of the checkpoint; 0: the initial weights"""
    instance: str


class Announced(_Record, frozen=True, kw_only=True, tag="Announced"):
    """A publish began; its buckets and probe are not kept."""

    incarnation: int
    number: int
    publish_sequence: int
    weights: WeightsName
    cells: list[Cell]


class WentLive(_Record, frozen=True, kw_only=True, tag="WentLive"):
    """Every engine of the publish has committed or is out; at least one has committed."""

    weights: WeightsName
    publish_sequence: int


class EvalOpened(_Record, frozen=True, kw_only=True, tag="EvalOpened"):
    """An evaluation round began: tickets first_group_id, first_group_id - 1, ..., all waiting."""

    weights: WeightsName
    first_group_id: int
    num_prompts: int


class EvalClaimed(_Record, frozen=True, kw_only=True, tag="EvalClaimed"):
    """A waiting eval ticket was handed to a generator, in answer to its claim `number`."""

    group_id: int
    attempt: int
    instance: str
    generator: str
    number: int


class EvalEnded(_Record, frozen=True, kw_only=True, tag="EvalEnded"):
    """An eval ticket ended: evaluated, or failed."""

    group_id: int
    attempt: int
    failed: bool = False
    detail: str = ""
    stats: EndStats = EndStats()
    weights_tokens: list[tuple[WeightsName, int]] = []
    """sampled tokens by the weights that sampled them"""


class EvalReissued(_Record, frozen=True, kw_only=True, tag="EvalReissued"):
    """The claim of `attempt` was lost; the eval ticket waits as attempt + 1."""

    group_id: int
    attempt: int


class DepthSet(_Record, frozen=True, kw_only=True, tag="DepthSet"):
    """Admission goes by another pipeline_depth from here on."""

    incarnation: int
    depth: int
    reason: str


class Finished(_Record, frozen=True, kw_only=True, tag="Finished"):
    """The trainer said that the run is over."""

    incarnation: int
    reason: str


Record = (
    RunNamed
    | DatasetAgreed
    | Made
    | Claimed
    | Stored
    | Dropped
    | Reissued
    | Drawn
    | Released
    | Trained
    | Settled
    | TrainerStarted
    | Announced
    | WentLive
    | EvalOpened
    | EvalClaimed
    | EvalEnded
    | EvalReissued
    | DepthSet
    | Finished
)

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """One JSON object without a line end."""
    return _ENCODER.encode(record)


def decode_record(line: bytes) -> Record:
    """The record in one line.

    Raises:
        msgspec.DecodeError: not JSON (a torn last line, for one).
        msgspec.ValidationError: JSON, but no record of this version.
    """
    record: Record = _DECODER.decode(line)
    return record
