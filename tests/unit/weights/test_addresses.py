"""Addresses of this machine, on its loopback interface: all that every machine has."""

import socket

import pytest

from async_grpo.errors import ConfigError, WeightSyncError
from async_grpo.weights.addresses import address_facing, listening_socket, require_own_address
from async_grpo.weights.group import listen

ELSEWHERE = "192.0.2.1"
"""Reserved for documentation: nobody's."""


def test_the_address_that_faces_another_is_on_the_way_there() -> None:
    assert address_facing("127.0.0.1", 1) == "127.0.0.1"
    assert address_facing("127.5.5.5", 1) == "127.0.0.1"


def test_a_name_that_nobody_has_is_an_error() -> None:
    with pytest.raises(socket.gaierror):
        address_facing("nohost.invalid", 1)


def test_it_listens_where_it_was_told_and_nowhere_else() -> None:
    with listening_socket("127.0.0.2") as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.2"
        socket.create_connection((host, port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_rendezvous_is_open_at_its_address_only() -> None:
    store, port = listen("127.0.0.2")
    socket.create_connection(("127.0.0.2", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    del store


def test_an_address_of_another_machine_is_refused_at_once() -> None:
    require_own_address("weights.host", "127.0.0.1")
    with pytest.raises(ConfigError, match=f"weights.host: cannot listen at {ELSEWHERE}: Cannot"):
        require_own_address("weights.host", ELSEWHERE)
    with pytest.raises(WeightSyncError, match="Cannot assign requested address"):
        listen(ELSEWHERE)
