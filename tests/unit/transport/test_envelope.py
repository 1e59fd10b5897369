"""Envelopes that no honest peer sends cost an error, never anything else."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.errors import CodecError, VersionMismatch
from async_grpo.replay_api.base import WIRE_VERSION, Ok
from async_grpo.replay_api.generator import Credit, End, WatchReply
from async_grpo.replay_api.peers import Hello
from async_grpo.replay_parts import EndStats, Role
from async_grpo.transport import envelope
from async_grpo.types import DropReason, WeightsName

HELLO = Hello(
    role=Role.GENERATOR,
    name="g0",
    instance="g0-1",
    wire_version=1,
    config_digest="d",
    bulk=False,
)
REQUESTS = [
    HELLO,
    Credit(group_id=1, attempt=2, num_bytes=3, wait_s=1.5),
    End(group_id=1, attempt=2, reason=DropReason.INVALID, stats=EndStats(reward_sum=0.5)),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_request_round_trip(request_):
    request_id, body = envelope.open_envelope(envelope.encode(77, request_))
    assert request_id == 77
    assert envelope.decode_request(body) == request_


@pytest.mark.parametrize("reply", [Ok(), WatchReply(revision=3, live=WeightsName(1, 2))])
def test_reply_round_trip(reply):
    _, body = envelope.open_envelope(envelope.encode(1, reply))
    assert envelope.decode_reply(body) == reply


def test_reply_is_no_request():
    _, body = envelope.open_envelope(envelope.encode(1, Ok()))
    with pytest.raises(CodecError, match="Ok"):
        envelope.decode_request(body)


def test_other_version_still_tells_whom_to_answer():
    tree = msgspec.msgpack.decode(envelope.encode(5, Ok()))
    with pytest.raises(VersionMismatch) as caught:
        envelope.open_envelope(msgspec.msgpack.encode({**tree, "wire_version": WIRE_VERSION + 1}))
    assert caught.value.args[1] == 5


@given(
    st.sampled_from(REQUESTS),
    st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=5)), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_mutated_envelopes_raise_only_what_the_server_expects(request_, edits, cut):
    data = bytearray(envelope.encode(7, request_))
    for where, new in edits:
        where %= len(data) + 1
        data[where : where + (len(data) if cut else len(new))] = new
    try:
        _, body = envelope.open_envelope(bytes(data))
        envelope.decode_request(body)
    except (CodecError, VersionMismatch):
        pass


@pytest.mark.parametrize(
    "body",
    [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc7\xff\x01", b""],
)
def test_bombs_in_the_body_are_refused(body):
    tree = {"wire_version": 1, "request_id": 1, "body": 0}

    def read() -> None:
        _, raw = envelope.open_envelope(msgspec.msgpack.encode(tree)[:-1] + body)
        envelope.decode_request(raw)

    with pytest.raises(CodecError):
        read()
