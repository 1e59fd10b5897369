"""The status line and the summary, from given answers and files."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_grpo.config.load import load_config, to_yaml
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.errors import ExitCode, PeerLost
from async_grpo.launch.status import StatusLine, format_status, read_metrics, utilization
from async_grpo.launch.summary import summarize
from async_grpo.launch.supervisor import Outcome
from async_grpo.replay.core.records import Made, encode_record
from async_grpo.replay_api.peers import PeerView, StatsReply
from async_grpo.replay_parts import EngineState, EngineStatus, Role, RoleStatus
from async_grpo.types import DropReason, TicketKind

TRAINER = RoleStatus(
    state="working", seconds={"starting": 50.0, "working": 30.0, "waiting": 10.0}, metrics={}
)
GENERATOR = RoleStatus(
    state="generating", seconds={"generating": 9.0, "waiting": 1.0}, metrics={"tokens_per_s": 5300}
)


def stats(**changes: Any) -> StatsReply:
    values: dict[str, Any] = {
        "tickets": 40, "waiting": 0, "claimed": 20, "stored": 6, "leased": 4, "trained": 8,
        "dropped": {DropReason.STALE: 1, DropReason.NO_SIGNAL: 1}, "reissued": {},
        "policy_version": 2, "live": None, "publish_sequence": 3, "stored_bytes": 3 << 19,
        "max_bytes": 1 << 30,
        "pipeline_depth": 2,
        "peers": [
            PeerView(role=Role.MONITOR, name="me", heartbeat_age_s=0.0, status=None),
            PeerView(role=Role.GENERATOR, name="g", heartbeat_age_s=0.1, status=GENERATOR),
            PeerView(role=Role.TRAINER, name="trainer", heartbeat_age_s=0.1, status=TRAINER),
        ],
    }  # fmt: skip
    return StatsReply(**(values | changes))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{output_dir: {tmp_path}/run, num_train_steps: 30}}\n"
        "policy: {model: m}\n"
        "task: {name: reverse}\n"
        "launch: {status_s: 0.001}\n"
    )
    return load_config(path)


def test_the_line() -> None:
    line = format_status(stats(), {"reward/mean": 0.25, "staleness/mean": 1.5}, 30, 2.0)
    assert line == (
        "step 2/30 | reward 0.250 | staleness 1.50 | trainer working (75% busy) | "
        "g generating (90% busy), 5,300 tokens/s | "
        "groups 20 claimed, 6 stored (1.5 MiB), 4 leased, 2 dropped (1 stale, 1 no_signal)"
    )


def test_the_line_before_the_first_step() -> None:
    line = format_status(stats(peers=[], dropped={}), {}, 30, 2.0)
    assert line == "step 2/30 | groups 20 claimed, 6 stored (1.5 MiB), 4 leased, 0 dropped"


def test_the_line_names_why_groups_ended_untrained() -> None:
    """A reward that nobody can earn shows minutes into a run, not at its deadline."""
    dropped = {DropReason.STALE: 0, DropReason.REWARD_FAILED: 3, DropReason.NO_SIGNAL: 409}
    line = format_status(stats(peers=[], dropped=dropped), {}, 30, 2.0)
    assert line.endswith("412 dropped (409 no_signal, 3 reward_failed)")


def test_a_role_that_says_nothing_any_more_is_called_silent() -> None:
    late = PeerView(role=Role.GENERATOR, name="g", heartbeat_age_s=4.2, status=GENERATOR)
    line = format_status(stats(peers=[late]), {}, 30, 2.0)
    assert "| g silent 4 s (90% busy)" in line


def test_utilization_begins_after_the_start() -> None:
    assert utilization(TRAINER) == 0.75
    assert utilization(RoleStatus(state="starting", seconds={"starting": 5.0})) is None


def test_a_line_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert read_metrics(path) == [{"step": 0}, {"step": 1}]
    assert read_metrics(path, tail_bytes=18) == [{"step": 1}]


class FakeMonitor:
    """Fails, then answers, then reports that all is told."""

    def __init__(self, answers: list[StatsReply | Exception]) -> None:
        self.answers = answers
        self.address = ""
        self.closed = False
        self.all_told = asyncio.Event()

    def open(self, config: Config) -> "FakeMonitor":
        self.address = config.replay.address
        return self

    async def connect(self) -> None:
        pass

    async def stats(self) -> StatsReply:
        if not self.answers:
            self.all_told.set()
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed = True


async def test_a_silent_server_does_not_end_the_line(config: Config) -> None:
    said: list[str] = []
    monitor = FakeMonitor([PeerLost("gone"), stats(), stats(peers=[])])
    line = StatusLine(config, RunDirectory(Path("x")), monitor.open, said.append, clock=lambda: 3)
    task = asyncio.create_task(line.loop("tcp://127.0.0.1:5"))
    await monitor.all_told.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert monitor.address == "tcp://127.0.0.1:5"
    assert monitor.closed
    assert said[0] == "00:00:00 replay: no answer (gone)"
    assert said[1].startswith("00:00:00 step 2/30 |")
    assert line.last_seen == {"g": GENERATOR, "trainer": TRAINER}
    assert len(said) == 3, "nothing went wrong in a role"


async def test_what_goes_wrong_in_a_role_is_said_once(config: Config) -> None:
    def hurt(error: str) -> StatsReply:
        status = RoleStatus(state="generating", last_error=error)
        peer = PeerView(role=Role.GENERATOR, name="g", heartbeat_age_s=0.1, status=status)
        return stats(peers=[peer])

    said: list[str] = []
    failed = "a reward:\n  ValueError"
    monitor = FakeMonitor([hurt(failed), hurt(failed), hurt("a reply")])
    line = StatusLine(config, RunDirectory(Path("x")), monitor.open, said.append, clock=lambda: 3)
    task = asyncio.create_task(line.loop("tcp://127.0.0.1:5"))
    await monitor.all_told.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [text for text in said if "last error" in text] == [
        "00:00:00 last error of g: a reward: ValueError",
        "00:00:00 last error of g: a reply",
    ]


def test_the_summary_of_a_run_that_never_began(config: Config) -> None:
    outcome = Outcome(ExitCode.PEER, "replay wrote no address within 60 s")
    summary = summarize(config, RunDirectory(Path(config.run.output_dir)), outcome, {})
    assert summary.audit_ok, "nothing speaks against a SIGTERM before anything was done"
    assert "replay wrote no address" in summary.text
    assert "0 of 30" in summary.text
    assert "nothing to audit" in summary.text
    assert "last error" not in summary.text


def test_the_summary_tells_what_last_went_wrong_in_each_role(config: Config) -> None:
    outcome = Outcome(ExitCode.PEER, "trainer ended with exit code 3", killed=("generator-0",))
    hurt = RoleStatus(state="generating", last_error="prompt 3: ValueError:\n  on purpose")
    seen = {"g": hurt, "trainer": TRAINER}
    summary = summarize(config, RunDirectory(Path(config.run.output_dir)), outcome, seen)
    assert "  last error   g: prompt 3: ValueError: on purpose\n" in summary.text
    assert summary.text.count("last error") == 1
    assert "  killed       generator-0: did not end in time\n" in summary.text


def test_ctrl_c_does_not_wait_for_the_audit(config: Config) -> None:
    directory = RunDirectory(Path(config.run.output_dir))
    directory.root.mkdir()
    directory.ledger.write_text("no ledger at all")
    summary = summarize(config, directory, Outcome(ExitCode.INTERRUPTED, "Ctrl-C"), {})
    assert f"audit        not made now: async-grpo audit {directory.root}" in summary.text


def test_the_summary_tells_what_was_learned_and_that_the_books_do_not_balance(
    config: Config,
) -> None:
    directory = RunDirectory(Path(config.run.output_dir))
    directory.root.mkdir()
    directory.config.write_text(to_yaml(config))
    lines = [
        {"reward/mean": step / 30, "staleness/mean": 1.0, "staleness/max": step % 4,
         "time/wall_s": step * 2.0}
        for step in range(30)
    ]  # fmt: skip
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # one ticket contradicts nothing but the missing witnesses
    directory.ledger.write_bytes(
        encode_record(Made(group_id=0, prompt_index=0, kind=TicketKind.TRAIN)) + b"\n"
    )
    outcome = Outcome(ExitCode.OK, "the trainer is done", restarts={"replay": 2})
    summary = summarize(config, directory, outcome, {"trainer": TRAINER, "g": GENERATOR})
    for part in (
        "30 of 30",
        "0.150 (first 10 steps) -> 0.817 (last 10)",
        "1.000 mean, 3 at most",
        "58.0 s",
        "trainer 75%, g 90%",
        "replay 2",
        "audit        NOT OK",
    ):
        assert part in summary.text, part
    assert not summary.audit_ok


def test_a_dead_engine_slot_is_in_the_line_and_in_the_summary(config: Config) -> None:
    """The run goes on with the others, at half its pace and with a right exit code."""
    engines = [
        EngineStatus(engine_id="g/0#1", state=EngineState.SERVING),
        EngineStatus(engine_id="g/1#7", state=EngineState.DEAD),
    ]
    peers = [
        PeerView(
            role=Role.GENERATOR, name="g", heartbeat_age_s=0.1, status=GENERATOR, engines=engines
        )
    ]
    assert "1 of 2 engines given up" in format_status(stats(peers=peers), {}, 30, 2.0)
    metrics = {"engines": 2.0, "engines_given_up": 1.0}
    seen = {"g": msgspec.structs.replace(GENERATOR, metrics=metrics, last_error="given up: g/1#7")}
    directory = RunDirectory(Path(config.run.output_dir))
    text = summarize(config, directory, Outcome(ExitCode.OK, "the trainer is done"), seen).text
    assert "  engines      g: 1 of 2 given up" in text
    assert "  last error   g: given up: g/1#7" in text
