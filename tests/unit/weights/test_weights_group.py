"""The update group between two processes, over gloo."""

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from async_grpo.errors import WeightSyncError
from async_grpo.weights.group import join_group, listen

NUM_REBUILDS = 20
TIMEOUT_S = 20.0


def receive_rounds(pipe: Connection) -> None:
    """Rank 1: for each (port, name) received, join, receive, answer with the sum, leave."""
    torch.set_num_threads(1)
    while (order := pipe.recv()) is not None:
        port, name, num_bytes = order
        group = join_group(
            host="127.0.0.1", port=port, rank=1, world_size=2, group_name=name,
            backend="gloo", timeout_s=TIMEOUT_S,
        )  # fmt: skip
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        group.broadcast(payload)
        group.close()
        pipe.send(int(payload.sum()))
    pipe.send(len(os.listdir("/proc/self/fd")))


@pytest.fixture
def receiver():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive_rounds, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.close()
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()


def send_one(receiver: Connection, name: str) -> tuple[int, int]:
    """One group's life; (sum sent, sum received)."""
    store, port = listen("127.0.0.1")
    receiver.send((port, name, 1000))
    group = join_group(
        host="127.0.0.1", port=port, rank=0, world_size=2, group_name=name,
        backend="gloo", timeout_s=TIMEOUT_S, store=store,
    )  # fmt: skip
    payload = torch.randint(256, (1000,), dtype=torch.uint8)
    group.broadcast(payload)
    received = receiver.recv()
    group.close()
    group.close()
    return int(payload.sum()), received


def test_a_network_card_that_the_user_names_is_taken(receiver: Connection, monkeypatch) -> None:
    """On one side only: the other finds out by itself."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    sent, received = send_one(receiver, "named")
    assert received == sent
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    store, port = listen("127.0.0.1")
    with pytest.raises(WeightSyncError, match="nosuch"):
        join_group(
            host="127.0.0.1", port=port, rank=0, world_size=2, group_name="unnamed",
            backend="gloo", timeout_s=TIMEOUT_S, store=store,
        )  # fmt: skip


def test_b083_rebuilding_the_group_leaks_no_descriptor(receiver: Connection) -> None:
    after_first = 0
    for number in range(NUM_REBUILDS):
        sent, received = send_one(receiver, f"rebuild-{number}")
        assert received == sent
        if number == 1:
            after_first = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= after_first
    receiver.send(None)
    assert receiver.recv() < 40


def test_works_beside_a_default_group(receiver: Connection, tmp_path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        sent, received = send_one(receiver, "beside")
        assert received == sent
        check = torch.ones(1)
        dist.all_reduce(check)
        assert check.item() == 1
    finally:
        dist.destroy_process_group()


def test_a_rendezvous_nobody_joins_ends_at_the_deadline() -> None:
    store, port = listen("127.0.0.1")
    with pytest.raises(WeightSyncError, match="join at"):
        join_group(
            host="127.0.0.1", port=port, rank=0, world_size=2, group_name="lonely",
            backend="gloo", timeout_s=0.5, store=store,
        )  # fmt: skip


def test_a_closed_group_refuses_to_broadcast(receiver: Connection) -> None:
    store, port = listen("127.0.0.1")
    receiver.send((port, "closed", 4))
    group = join_group(
        host="127.0.0.1", port=port, rank=0, world_size=2, group_name="closed",
        backend="gloo", timeout_s=TIMEOUT_S, store=store,
    )  # fmt: skip
    group.broadcast(torch.zeros(4, dtype=torch.uint8))
    group.close()
    with pytest.raises(WeightSyncError, match="closed"):
        group.broadcast(torch.zeros(4, dtype=torch.uint8))
