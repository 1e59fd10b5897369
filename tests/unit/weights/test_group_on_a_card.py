"""Update groups as NCCL makes them: how they end, and on which stream they work."""

import json
import subprocess
import sys
import threading

import pytest
import torch

from async_grpo.errors import WeightSyncError
from async_grpo.weights.group import NCCL_DEFAULTS
from tests.fakes.fake_collectives import CARD, FakeBackend, FakeCuda, fake_group

PAYLOAD = torch.zeros(4, dtype=torch.uint8)
MISMATCH = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, invalid usage \
(run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Mismatched NCCL version detected : rank 0 version 22907 rank 1 version 23007
Exception raised from create at ../torch/csrc/distributed/c10d/NCCLUtils.cpp:93 (most recent first):
frame #0: c10::Error::Error
"""


def test_an_error_of_nccl_keeps_the_line_that_names_the_cause():
    group = fake_group(FakeBackend(fails=MISMATCH))
    with pytest.raises(WeightSyncError) as caught:
        group.broadcast(PAYLOAD)
    message = str(caught.value)
    assert "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7; " in message
    assert message.endswith(
        "last error: Mismatched NCCL version detected : rank 0 version 22907 rank 1 version 23007"
    )
    group.close()


def test_an_error_of_one_line_stays_as_it_is():
    group = fake_group(FakeBackend(fails="Connection closed by peer [10.0.0.2]:4711"))
    with pytest.raises(WeightSyncError, match=r"'broadcast': Connection closed by peer \S+:4711$"):
        group.broadcast(PAYLOAD)
    group.close()


def test_a_healthy_group_is_destroyed():
    backend = FakeBackend()
    group = fake_group(backend)
    group.broadcast(PAYLOAD)
    group.close()
    assert backend.calls == ["broadcast", "shutdown"]


def test_a_group_in_which_a_broadcast_failed_is_aborted_not_destroyed():
    backend = FakeBackend(fails="unhandled system error")
    group = fake_group(backend)
    with pytest.raises(WeightSyncError):
        group.broadcast(PAYLOAD)
    group.close()
    assert backend.calls == ["broadcast", "abort"]


def test_an_abort_frees_the_thread_that_is_in_a_broadcast():
    backend = FakeBackend(hangs=True)
    group = fake_group(backend)
    errors = []

    def send() -> None:
        with pytest.raises(WeightSyncError) as caught:
            group.broadcast(PAYLOAD)
        errors.append(str(caught.value))

    sending = threading.Thread(target=send)
    sending.start()
    assert backend.entered.wait(10)
    group.abort()
    sending.join(10)
    assert "communicator was aborted" in errors[0]
    assert backend.calls == ["broadcast", "abort"]
    assert group.closed


def test_a_broadcast_runs_on_a_stream_of_its_group_and_waits_only_for_that(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    backend = FakeBackend()
    finish = backend.finish

    def finish_and_tell() -> None:
        cuda.log.append(f"wait for the collective on {cuda.current.name}")
        finish()

    backend.finish = finish_and_tell
    group = fake_group(backend, device=CARD)
    ready = cuda.current.record_event()
    cuda.log.clear()
    group.broadcast(PAYLOAD, ready=ready)
    assert cuda.log == [
        "enter side0", "side0 waits for an event", "wait for the collective on side0",
        "leave side0", "synchronize side0",
    ]  # fmt: skip
    cuda.log.clear()
    group.broadcast(PAYLOAD)  # a receiver: its buffer may still be read by what is queued
    assert cuda.log[:3] == ["record on default", "enter side0", "side0 waits for an event"]
    other = fake_group(FakeBackend(), device=CARD)
    cuda.log.clear()
    other.broadcast(PAYLOAD, ready=ready)
    assert "enter side1" in cuda.log, "cells wait for each other"
    assert "record on default" not in cuda.log
    group.close()
    other.close()


_JOIN = """
import json, os, sys
from async_grpo.errors import WeightSyncError
from async_grpo.weights.group import NCCL_DEFAULTS, join_group, listen

found = []
for backend in sys.argv[1:]:
    store, port = listen("127.0.0.1")
    try:
        join_group(host="127.0.0.1", port=port, rank=0, world_size=2, group_name=backend,
                   backend=backend, timeout_s=0.1, store=store)
    except WeightSyncError:
        pass  # nobody joins, and this torch may have no nccl
    found.append({name: os.environ.get(name) for name in NCCL_DEFAULTS})
print(json.dumps(found))
"""


def environments(monkeypatch, *backends: str, **variables: str) -> list[dict[str, str | None]]:
    for name in NCCL_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-c", _JOIN, *backends], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nccl_groups_are_made_without_a_watchdog_and_gloo_groups_change_nothing(monkeypatch):
    over_gloo, over_nccl = environments(monkeypatch, "gloo", "nccl")
    assert set(over_gloo.values()) == {None}
    assert over_nccl == NCCL_DEFAULTS
    assert NCCL_DEFAULTS["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert NCCL_DEFAULTS["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_what_the_user_has_set_for_nccl_stays(monkeypatch):
    (found,) = environments(
        monkeypatch, "nccl", TORCH_NCCL_BLOCKING_WAIT="0", NCCL_ASYNC_ERROR_HANDLING="1",
        NCCL_NVLS_ENABLE="1",
    )  # fmt: skip
    assert found == {
        "TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": None,
        "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1",
    }  # fmt: skip
