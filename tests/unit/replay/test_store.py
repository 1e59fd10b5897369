import os
import signal
import subprocess
import sys

import pytest

from async_grpo.errors import AsyncGrpoError
from async_grpo.replay.store import Ledger, PayloadStore


def test_lines_survive_reopening(tmp_path):
    path = tmp_path / "run" / "ledger.jsonl"
    ledger = Ledger(path)
    assert list(ledger.lines()) == []
    ledger.append([b'{"a":1}', b'{"b":2}\n'])
    ledger.close()
    assert path.read_bytes() == b'{"a":1}\n{"b":2}\n'
    again = Ledger(path)
    assert list(again.lines()) == [b'{"a":1}', b'{"b":2}']
    again.append([b'{"c":3}'])
    again.close()
    assert path.read_bytes() == b'{"a":1}\n{"b":2}\n{"c":3}\n'


@pytest.mark.parametrize("torn", [b'{"c', b"x" * 5000])
def test_torn_last_line_is_cut_off(tmp_path, torn):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"a":1}\n' + torn)
    ledger = Ledger(path)
    assert list(ledger.lines()) == [b'{"a":1}']
    ledger.append([b'{"b":2}'])
    ledger.close()
    assert path.read_bytes() == b'{"a":1}\n{"b":2}\n'


def test_ledger_of_one_torn_line_is_empty(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"a"')
    ledger = Ledger(path)
    assert list(ledger.lines()) == []
    ledger.close()
    assert path.read_bytes() == b""


def test_second_server_is_refused_until_the_first_is_gone(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path)
    with pytest.raises(AsyncGrpoError, match=r"in use by another replay server.*run\.output_dir"):
        Ledger(path)
    first.close()
    Ledger(path).close()


def test_lines_survive_kill_9(tmp_path):
    path = tmp_path / "ledger.jsonl"
    program = (
        "import sys, signal\n"
        "from pathlib import Path\n"
        "from async_grpo.replay.store import Ledger\n"
        "Ledger(Path(sys.argv[1])).append([b'{\"kept\":1}'])\n"
        "print('written', flush=True)\n"
        "signal.pause()\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait(timeout=20)
    writer.stdout.close()
    ledger = Ledger(path)
    assert list(ledger.lines()) == [b'{"kept":1}']
    ledger.close()


def test_payload_bytes_are_counted():
    store = PayloadStore()
    store.put((1, 0), [b"12", memoryview(b"345")])
    store.put((2, 0), [b"6"])
    assert store.num_bytes == 6
    assert store.get((1, 0)) == [b"12", b"345"]
    store.forget([(1, 0), (7, 7)])
    assert store.num_bytes == 1
    assert store.get((1, 0)) is None
