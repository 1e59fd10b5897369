"""Requests in flight across weight updates of a real server, driven as a generator drives it."""

import pytest

from async_grpo.config.generation import OnWeightUpdate
from tests.contracts.engine.conftest import REAL_MARKS, VOCAB_SIZE
from tests.fakes.engine_station import fly_through_updates, station
from tests.sglang.real_server import RealServer

pytestmark = REAL_MARKS

NUM_FLIGHTS = 3
"""Of three requests through twelve updates each."""


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("sglang", mode) for mode in OnWeightUpdate),
        ("sglang-tp2", OnWeightUpdate.retract),
        ("sglang-tp2", OnWeightUpdate.in_place),
    ],
)
async def test_requests_in_flight_outlast_two_updates(
    real_servers: dict[str, RealServer], name: str, mode: OnWeightUpdate
) -> None:
    """Exact to the token: SGLang names the weights of one token wrongly under `in_place`."""
    server = real_servers[name]
    incarnation = 100 + list(OnWeightUpdate).index(mode)
    async with station(server.url, mode, server.keys, vocab_size=VOCAB_SIZE) as at:
        assert at.engine.num_late_tokens == 1
        await fly_through_updates(at, incarnation=incarnation, mode=mode)


@pytest.mark.parametrize("name", ["sglang", "sglang-tp2"])
async def test_many_in_place_updates_are_exact_on_all_ranks(
    real_servers: dict[str, RealServer], name: str
) -> None:
    """A rank that paused later, or kept other KV, would sample other log-probs, or hang."""
    server, mode = real_servers[name], OnWeightUpdate.in_place
    async with station(server.url, mode, server.keys, vocab_size=VOCAB_SIZE) as at:
        assert at.engine.info.tp_size == server.tp_size
        for flight in range(NUM_FLIGHTS):
            await fly_through_updates(
                at, incarnation=200 + flight, mode=mode, num_updates=12, every=30
            )
