"""Every mistake of the table, made from the shell: told, with exit code, without traceback."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from async_grpo.config.engine_keys import EngineKeys
from async_grpo.engine_api import Path as Route
from async_grpo.replay.core.records import Made, encode_record
from async_grpo.types import TicketKind
from tests.e2e.mistakes import (
    AT_AN_ENGINE,
    BESIDE_A_SERVER,
    CONFIGURATION,
    EVERYTHING,
    MODEL_AND_TASK,
    PAGE,
    PEERS,
    Mistake,
    page,
)
from tests.fakes.fake_engine import FakeEngine, Fault

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

CONFIG = """
run: {{output_dir: {root}/run, num_train_steps: 3, no_progress_timeout_s: 6}}
policy: {{model: {model}}}
task: {{name: reverse, options: {{length: 3, alphabet: abcd}}}}
generation: {{group_size: 4, max_new_tokens: 5}}
engine: {{context_length: 32, max_running_requests: 32}}
replay:
  address: tcp://127.0.0.1:9
  groups_per_step: 8
  max_bytes: 16777216
  heartbeat_s: 0.5
  peer_timeout_s: 3
metrics: {{tensorboard: false}}
"""


@dataclass
class Shell:
    """A folder of wrong and right files."""

    root: Path
    model: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    def arguments(self, command: str, address: str = "") -> list[str]:
        filled = command.replace("@", str(self.config)).replace("%", str(self.root))
        return [sys.executable, "-m", "async_grpo", *filled.replace("$", address).split()]

    def make(self, mistake: Mistake, address: str = "") -> None:
        done = subprocess.run(
            self.arguments(mistake.command, address), capture_output=True, text=True, timeout=150,
            cwd=self.root, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert done.returncode == mistake.code, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        position = 0
        for part in mistake.says:
            position = done.stderr.find(part, position)
            assert position >= 0, f"{part!r} is not in\n{done.stderr}"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, toy_model: Path) -> Shell:
    root = tmp_path_factory.mktemp("mistakes")
    text = CONFIG.format(root=root, model=toy_model)
    (root / "config.yaml").write_text(text)
    data = text.replace(
        "name: reverse, options: {length: 3, alphabet: abcd}",
        f"name: jsonl, options: {{path: {root}/nothing.jsonl}}",
    )
    (root / "data.yaml").write_text(data)
    (root / "bad.yaml").write_text("run: {output_dir: [")
    (root / "list.yaml").write_text("- run\n")
    (root / "empty.yaml").write_text("")
    (root / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    (root / "raises.py").write_text("raise ValueError('on purpose')\n")
    (root / "hollow").mkdir()
    shutil.copytree(toy_model, root / "cut_off")
    (root / "cut_off" / "model.safetensors").write_bytes(b"half a file")
    shutil.copytree(toy_model, root / "too_few")
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    model = json.loads((toy_model / "config.json").read_text())
    (root / "too_few" / "config.json").write_text(json.dumps(model | layers))
    (root / "no_tokenizer").mkdir()
    (root / "no_tokenizer" / "config.json").write_text("{}")
    (root / "no_tokenizer" / "model.safetensors").write_bytes(b"")
    old = root / "old"
    old.mkdir()
    (old / "config.yaml").write_text(text.replace(f"{root}/run", str(old)))
    (old / "ledger.jsonl").write_bytes(
        encode_record(Made(group_id=0, prompt_index=0, kind=TicketKind.TRAIN)) + b"\n"
    )
    return Shell(root, toy_model)


@dataclass
class Server:
    """A replay server that runs alone."""

    process: "subprocess.Popen[bytes]"
    address: str


@pytest.fixture(scope="module")
def server(shell: Shell) -> Iterator[Server]:
    args = shell.arguments("replay @ replay.address=tcp://127.0.0.1:0")
    with (shell.root / "replay.output").open("wb") as output:
        process = subprocess.Popen(args, stdout=output, stderr=output, cwd=shell.root)
    path = shell.root / "run" / "replay" / "address"
    deadline = time.monotonic() + 40
    while not path.exists():
        assert process.poll() is None, (shell.root / "replay.output").read_text()
        assert time.monotonic() < deadline, "the replay server wrote no address"
        time.sleep(0.05)
    yield Server(process, path.read_text().strip())
    process.terminate()
    assert process.wait(20) == 0


def words(mistake: Mistake) -> str:
    return mistake.what


@pytest.mark.parametrize("mistake", CONFIGURATION, ids=words)
def test_a_wrong_configuration(shell: Shell, mistake: Mistake) -> None:
    shell.make(mistake)


@pytest.mark.parametrize("mistake", MODEL_AND_TASK, ids=words)
def test_a_wrong_model_or_task(shell: Shell, mistake: Mistake) -> None:
    shell.make(mistake)


@pytest.mark.parametrize("mistake", PEERS, ids=words)
def test_a_wrong_peer(shell: Shell, mistake: Mistake) -> None:
    shell.make(mistake)


@pytest.mark.parametrize("mistake", BESIDE_A_SERVER, ids=words)
def test_a_wrong_peer_beside_a_server(shell: Shell, server: Server, mistake: Mistake) -> None:
    shell.make(mistake, server.address)


def test_two_generators_of_one_name_the_first_one_ends(shell: Shell, server: Server) -> None:
    command = "generator @ --name twin replay.address=$ engine.urls=[http://127.0.0.1:9]"
    args = shell.arguments(f"{command} run.no_progress_timeout_s=40", server.address)
    first = subprocess.Popen(args, stderr=subprocess.PIPE, text=True, cwd=shell.root)
    second = None
    try:
        log = shell.root / "run" / "logs" / "replay.log"
        deadline = time.monotonic() + 40
        while "generator twin said hello" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        second = subprocess.Popen(args, stderr=subprocess.DEVNULL, cwd=shell.root)
        _, stderr = first.communicate(timeout=40)
        assert first.returncode == 3, stderr
        assert "another generator named 'twin' has joined since" in stderr
        assert "Traceback" not in stderr
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(20)


def test_two_trainers_on_one_run(shell: Shell, server: Server) -> None:
    args = shell.arguments("trainer @ replay.address=$", server.address)
    log = shell.root / "run" / "logs" / "replay.log"
    hello = "trainer trainer said hello"
    before = log.read_text().count(hello)  # trainers of other tests at this server
    first = subprocess.Popen([*args, "run.no_progress_timeout_s=90"], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 150
        while log.read_text().count(hello) == before:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        second = subprocess.run(args, capture_output=True, text=True, timeout=150)
        assert second.returncode == 3, second.stderr
        assert "this run has a trainer already" in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        first.terminate()
        first.wait(20)


def bad_engine(mistake: Mistake, shell: Shell) -> FakeEngine:
    """The engine that the mistake is about."""
    vocab_size = json.loads((shell.model / "config.json").read_text())["vocab_size"]
    if "500" in mistake.what:
        engine = FakeEngine(vocab_size=vocab_size)
        engine.fail_next(Route.SERVER_INFO, Fault.STATUS_500, times=100_000)
        return engine
    if "vocabulary" in mistake.what:
        return FakeEngine(vocab_size=640)
    if "key" in mistake.what:
        return FakeEngine(vocab_size=vocab_size, keys=EngineKeys(api="a secret"))
    return FakeEngine(vocab_size=vocab_size, context_length=9)


@pytest.mark.parametrize("mistake", AT_AN_ENGINE, ids=words)
async def test_a_wrong_engine(shell: Shell, server: Server, mistake: Mistake) -> None:
    async with bad_engine(mistake, shell) as engine:
        command = mistake.command.replace("URL", engine.url)
        await asyncio.to_thread(shell.make, replace(mistake, command=command), server.address)
        assert not engine.num_calls(Route.GENERATE), "nothing is sampled"
        assert not engine.num_calls(Route.BEGIN_UPDATE), "no weights are sent"


def test_a_run_goes_on_when_nobody_reads_its_output_any_more(shell: Shell) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    own = "run.output_dir=%/unread replay.address=tcp://127.0.0.1:0"
    args = shell.arguments(f"run @ {own} task.reward=nosuch:f")
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run(
            args, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, cwd=shell.root
        )
    assert done.returncode == 2, done.stderr  # it ends by what it meets, not by its output
    assert "task.reward: cannot import 'nosuch'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk(shell: Shell) -> None:
    folder = shell.root / "small"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=8k tmpfs {folder}"
    inside = ["unshare", "-rm", "sh", "-c"]
    if subprocess.run([*inside, mount], capture_output=True, timeout=20).returncode:
        pytest.skip("no mount namespaces for this user")
    fill = f"head -c 8192 /dev/zero > {folder}/filler"
    role = " ".join(shell.arguments(f"replay @ run.output_dir={folder}/run"))
    script = f"{mount} && ({fill}; exec {role})"
    done = subprocess.run(
        [*inside, script], capture_output=True, text=True, timeout=60, cwd=shell.root
    )
    assert done.returncode == 1, done.stderr
    assert "make room and start again" in done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_is_current_and_the_table_is_long() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run python -m tests.e2e.mistakes"
    assert len({mistake.what for mistake in EVERYTHING}) == len(EVERYTHING) >= 40
