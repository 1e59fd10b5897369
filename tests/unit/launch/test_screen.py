"""The live screen, drawn from given figures at 80 columns."""

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import msgspec
from rich.console import Console

from async_grpo.launch.screen import Picture, Screen, clock_text, draw, eta_s, sparkline
from async_grpo.replay_api.peers import PeerView, StatsReply
from async_grpo.replay_parts import EngineState, EngineStatus, Role, RoleStatus


def peer(role: Role, name: str, state: str, error: str = "", speed: float = 0.0) -> PeerView:
    status = RoleStatus(
        state=state,
        last_error=error,
        metrics={"tokens_per_s": speed},
        seconds={"starting": 50.0, "working": 30.0, "generating": 30.0, "waiting": 20.0},
    )
    return PeerView(role=role, name=name, heartbeat_age_s=0.1, status=status)


def picture(
    peers: Sequence[PeerView] = (),
    steps: Sequence[Mapping[str, Any]] = (),
    restarts: Mapping[str, int] | None = None,
) -> Picture:
    stats = StatsReply(
        tickets=40, waiting=0, claimed=20, stored=6, leased=4, trained=8, dropped={}, reissued={},
        policy_version=10, live=None, publish_sequence=3, stored_bytes=1 << 29, max_bytes=1 << 30,
        pipeline_depth=2, peers=list(peers),
    )  # fmt: skip
    return Picture(
        stats=stats, steps=steps, num_train_steps=40, max_staleness=4, elapsed_s=80.0,
        heartbeat_s=2.0, restarts=restarts or {},
    )  # fmt: skip


def drawn(shown: Picture, width: int = 80) -> list[str]:
    console = Console(file=StringIO(), width=width, height=24, force_terminal=False)
    console.print(draw(shown))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


STEPS = [
    {"reward/mean": step / 10, "staleness/mean": 1.25, "staleness/max": 3,
     "time/wall_s": step * 2.0, "tokens/trained_per_s": 1234.4}
    for step in range(10)
]  # fmt: skip


def test_everything_is_on_it() -> None:
    peers = [
        peer(Role.GENERATOR, "generator-0", "generating", "engine died:\nkilled", speed=5300.0),
        peer(Role.TRAINER, "trainer", "working"),
    ]
    restarts = {"trainer": 0, "generator-0": 2, "replay": 1}
    lines = drawn(picture(peers, STEPS, restarts))
    text = "\n".join(lines)
    for part in (
        "10/40 [#####...............] 25%", "0:01:20 so far, 0:01:00 left",
        "0.900", "1.25 mean, 3 at most", "bound 4 train steps", "5,300 sampled, 1,234 trained",
        "50% of 1,024 MiB", "20 claimed, 6 stored, 4 leased; 8 trained, 0 dropped",
        "engine died: killed",
    ):  # fmt: skip
        assert part in text, part
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["generator-0"][1:4] == ["generating", "75%", "2"]
    assert rows["replay"][1:4] == ["serving", "-", "1"]
    names = [line.split()[0] for line in lines if line and line.split()[0] in restarts]
    assert names == ["trainer", "generator-0", "replay"]


def test_a_role_that_says_nothing_any_more_is_called_silent() -> None:
    late = msgspec.structs.replace(
        peer(Role.GENERATOR, "generator-0", "generating"), heartbeat_age_s=4.2
    )
    (row,) = [line for line in drawn(picture([late])) if line.startswith("generator-0")]
    assert row.split()[1:4] == ["silent", "4", "s"]


def test_it_fits_a_small_terminal_whatever_happens() -> None:
    peers = [
        peer(Role.GENERATOR, f"generator-{index}-on-a-host-with-a-long-name", "generating",
             "an error that is far longer than the room that there is for it " * 3)
        for index in range(30)
    ]  # fmt: skip
    lines = drawn(picture(peers, STEPS))
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    assert "and 22 more" in "\n".join(lines)


def test_before_the_first_step() -> None:
    text = "\n".join(drawn(picture(restarts={"trainer": 0})))
    assert "no step yet" in text
    assert "left" not in text.replace("leased", "")
    assert "away" in text


def test_pace_and_clock() -> None:
    assert eta_s(picture(steps=STEPS)) == 60.0
    assert eta_s(picture(steps=STEPS[:1])) is None
    assert clock_text(3725.9) == "1:02:05"


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([0.0, 1.0]) == "\u2581\u2588"
    assert sparkline([0.5, 0.5]) == "\u2581\u2581"


def test_lines_printed_meanwhile_stay_above() -> None:
    console = Console(file=StringIO(), width=80, height=24, force_terminal=True)
    with Screen(console) as screen:
        screen.show(picture(steps=STEPS))
        console.print("generator-0 was killed by SIGKILL; restart 1 of 3")
    text = console.file.getvalue()
    assert text.rindex("so far") > text.index("was killed by SIGKILL")


def test_engines_that_cannot_serve_are_on_it() -> None:
    states = [EngineState.SERVING, EngineState.DEAD, EngineState.QUARANTINED, EngineState.SERVING]
    engines = [EngineStatus(engine_id=f"g/{n}#1", state=state) for n, state in enumerate(states)]
    generator = peer(Role.GENERATOR, "generator-0", "generating")
    text = "\n".join(drawn(picture([msgspec.structs.replace(generator, engines=engines)])))
    assert "generator-0: 1 of 4 engines given up, 1 of 4 engines quarantined" in text
    assert "given up" not in "\n".join(drawn(picture([generator])))
