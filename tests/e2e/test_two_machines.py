"""A trainer and a generator on two machines: two network namespaces with a cable between them.

Each has its own network: its own loopback interface, where the other one's engines cannot be
reached, and one card. This machine's name leads to loopback in both, as on many a real one. Needs
root and iproute2, and is skipped without.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminals import Terminals

from async_grpo.analysis.audit import AuditReport, audit
from async_grpo.config.run_directory import RunDirectory

pytestmark = [pytest.mark.faults, pytest.mark.timeout(500)]

TRAINER_HOST, GENERATOR_HOST = "10.77.0.1", "10.77.0.2"
PORT = 29571  # each namespace has all ports


class Machines:
    """Two namespaces; commands run in them by `on`."""

    def __init__(self) -> None:
        self._names = [f"async-grpo-{os.getpid()}-{side}" for side in "ab"]
        self._stack: list[str] = []

    def connect(self) -> None:
        """Make them. Raises OSError or CalledProcessError where that is not allowed."""
        for name in self._names:
            ip("netns", "add", name)
            self._stack.append(name)
        a, b = self._names
        ip("-n", a, "link", "add", "card", "type", "veth", "peer", "name", "card", "netns", b)
        for name, host in zip(self._names, (TRAINER_HOST, GENERATOR_HOST), strict=True):
            ip("-n", name, "address", "add", f"{host}/24", "dev", "card")
            for device in ("lo", "card"):
                ip("-n", name, "link", "set", device, "up")
            ip("netns", "exec", name, "true")  # not all that may make one may enter it

    def on(self, index: int) -> list[str]:
        """What a command begins with to run there."""
        return ["ip", "netns", "exec", self._names[index]]

    def pull_the_cable(self) -> None:
        """Nothing comes through, and nobody is told."""
        ip("-n", self._names[1], "link", "set", "card", "down")

    def plug_it_in(self) -> None:
        """As before."""
        ip("-n", self._names[1], "link", "set", "card", "up")

    def remove(self) -> None:
        """The namespaces, and the cable with them."""
        for name in self._stack:
            ip("netns", "delete", name)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=20)


@pytest.fixture
def machines() -> Iterator[Machines]:
    found = Machines()
    try:
        found.connect()
    except (OSError, subprocess.CalledProcessError) as error:
        found.remove()
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    yield found
    found.remove()


@pytest.fixture
def terminals(tmp_path: Path, toy_model: Path, machines: Machines) -> Iterator[Terminals]:
    found = Terminals(tmp_path, toy_model, f"tcp://{TRAINER_HOST}:{PORT}")
    yield found
    found.end()


def start(terminals: Terminals, machines: Machines, *settings: str) -> None:
    """Everything but the generator and its engine on the first machine, as the README has it."""
    near, far = machines.on(0), machines.on(1)
    terminals.start("replay", *settings, prefix=near)
    terminals.start("trainer", f"weights.host={TRAINER_HOST}", *settings, prefix=near)
    own_directory = f"run.output_dir={terminals.root}/far"
    terminals.start("generator", "--name", "far", own_directory, *settings, prefix=far)


def report_of(terminals: Terminals) -> AuditReport:
    """The audit, with the generator's log brought over."""
    far = RunDirectory(terminals.root / "far").generator_log("far")
    shutil.copy(far, terminals.directory.generator_log("far"))
    report = audit(terminals.directory.root)
    assert report.ok, report.problems
    return report


@pytest.mark.parametrize("transport", ["broadcast", "http"])
def test_a_run_across_the_cable(terminals: Terminals, machines: Machines, transport: str) -> None:
    start(terminals, machines, f"weights.transport={transport}")
    terminals.finish()
    assert report_of(terminals).trained == 3 * 8


def test_the_cable_is_pulled_for_longer_than_peers_are_waited_for(
    terminals: Terminals, machines: Machines
) -> None:
    start(terminals, machines, "run.num_train_steps=12")
    terminals.until(lambda: terminals.num_steps() >= 3, "step 3")
    machines.pull_the_cable()
    lost = "far has not been heard of for 3 s"
    terminals.until(lambda: lost in terminals.output("replay"), "loss of the generator")
    machines.plug_it_in()
    terminals.finish()
    report = report_of(terminals)
    assert (report.trained, report.duplicates_trained) == (12 * 8, 0)
