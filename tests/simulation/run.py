"""Simulate schedules: `python -m tests.simulation.run --schedules 100000 --workers 2`.

A failure prints its seed; `--seed N --verbose` repeats it with a trace.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from async_grpo.replay.core.core import ReplayCore
from async_grpo.replay.core.tickets import OPEN
from tests.simulation.generator_process import GeneratorProcess
from tests.simulation.schedule import schedule_of
from tests.simulation.trainer_process import TrainerProcess
from tests.simulation.world import Process, World

PATIENCE_S = 400.0
"""simulated seconds that a run may take after its faults have ended"""


@dataclass
class Outcome:
    """Figures of simulated schedules."""

    num_schedules: int = 0
    num_events: int = 0
    num_server_restarts: int = 0
    num_trainer_restarts: int = 0
    num_generator_restarts: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    """(seed, what happened)"""

    def add(self, other: "Outcome") -> None:
        """Add up."""
        for name in ("num_schedules", "num_events", "num_server_restarts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.num_trainer_restarts += other.num_trainer_restarts
        self.num_generator_restarts += other.num_generator_restarts
        self.failures += other.failures


class Run:
    """One schedule from start to end."""

    def __init__(
        self,
        seed: int,
        core_class: type[ReplayCore] = ReplayCore,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.schedule = schedule_of(seed)
        self.world = World(self.schedule, core_class, trace)
        self.starts: dict[str, int] = {}
        self.processes: dict[str, Process] = {}

    def run(self) -> Outcome:
        """Simulate; raises AssertionError at the first broken rule."""
        world, schedule = self.world, self.schedule
        world.log(f"{schedule}")
        world.server.start()
        for number in range(schedule.num_generators):
            world.after(world.rng.uniform(0.0, 3.0), self._start, f"g{number}")
        world.after(world.rng.uniform(0.0, 3.0), self._start, "trainer")
        if world.faulty:
            self._plan_fault()
            world.after(schedule.faults_until_s, self._calm_down)
        deadline = schedule.faults_until_s + PATIENCE_S
        while not world.server.finished:
            assert world.advance(), "nothing can happen any more"
            assert world.now <= deadline, (
                f"no end {PATIENCE_S} s after the faults: step {len(world.shadow.steps)} of "
                f"{schedule.settings.num_train_steps}"
            )
        self._check_end()
        return Outcome(
            num_schedules=1,
            num_events=world.num_events,
            num_server_restarts=world.server.num_restarts,
            num_trainer_restarts=self.starts["trainer"] - 1,
            num_generator_restarts=sum(n - 1 for p, n in self.starts.items() if p != "trainer"),
        )

    def _check_end(self) -> None:
        core = self.world.server.core
        assert core is not None
        assert core.policy_version == self.schedule.settings.num_train_steps, "steps are missing"
        num_open = core.state.book.count(*OPEN)
        assert num_open == 0, f"{num_open} tickets are open at the end"
        for step, record in core.state.versions.steps.items():
            witness = self.world.trained[step]
            assert witness == (record.incarnation, record.groups), (
                f"step {step}: ledger {record}, trainer {witness}"
            )

    # -- processes and faults -------------------------------------------------------------------

    def _start(self, name: str) -> None:
        number = self.starts[name] = self.starts.get(name, 0) + 1
        kind = TrainerProcess if name == "trainer" else GeneratorProcess
        self.world.log(f"start {name}#{number}")
        process = self.processes[name] = kind(self.world, name, number)
        process.on_end = self._restart

    def _restart(self, process: Process) -> None:
        """A process has ended: start it again, as a supervisor would."""
        self.world.after(self.world.rng.uniform(0.1, 4.0), self._start, process.name)

    def _plan_fault(self) -> None:
        gap = self.world.rng.expovariate(1 / self.schedule.mean_fault_gap_s)
        self.world.after(gap, self._fault)

    def _fault(self) -> None:
        world = self.world
        if not world.faulty:
            return
        self._plan_fault()
        victims = ["server", "server", "trainer", "generator", "partition"]
        victim = world.rng.choice(victims + self.schedule.trainer_storm * ["trainer"] * 12)
        if victim == "server":
            if world.server.core is None:
                return
            if world.rng.random() < 0.5:
                world.server.crash()
            else:
                world.server.tear_after = world.rng.randint(0, 3)
            return
        names = sorted(name for name in self.processes if name != "trainer")
        name = "trainer" if victim == "trainer" else world.rng.choice(names or ["trainer"])
        if victim == "partition":
            name = world.rng.choice(sorted(self.processes) or ["trainer"])
        process = self.processes.get(name)
        if process is None or not process.alive:
            return
        if victim == "partition":
            process.partitioned_until = world.now + world.rng.uniform(1.0, 12.0)
            world.log(f"{name} is cut off until {process.partitioned_until:.3f}")
        else:
            world.log(f"kill {process.instance}")
            process.kill()

    def _calm_down(self) -> None:
        self.world.log("no more faults")
        self.world.faulty = False
        self.world.server.tear_after = -1
        for process in self.processes.values():
            process.partitioned_until = 0.0


def simulate(seeds: Iterable[int], core_class: type[ReplayCore] = ReplayCore) -> Outcome:
    """All of `seeds`; failures are collected, not raised."""
    total = Outcome()
    for seed in seeds:
        try:
            total.add(Run(seed, core_class).run())
        except (AssertionError, KeyError, IndexError, TypeError, ValueError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__} at {where.name}:{where.lineno}: {error}"
            total.add(Outcome(num_schedules=1, failures=[(seed, text)]))
    return total


def _chunk(seeds: range) -> Outcome:
    return simulate(seeds)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="simulate only this one")
    parser.add_argument("--verbose", action="store_true", help="print every event of --seed")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        outcome = Run(options.seed, trace=print if options.verbose else None).run()
        print(f"seed {options.seed}: ok, {outcome.num_events} events")
        return 0
    started = time.perf_counter()
    last = options.first_seed + options.schedules
    chunks = [
        range(first, min(first + 100, last)) for first in range(options.first_seed, last, 100)
    ]
    total = Outcome()
    with ProcessPoolExecutor(options.workers) as pool:
        for outcome in pool.map(_chunk, chunks):
            total.add(outcome)
            for seed, text in outcome.failures:
                print(f"FAILED seed {seed}: {text}", flush=True)
    seconds = time.perf_counter() - started
    print(
        f"{total.num_schedules} schedules, {total.num_events} events, "
        f"{total.num_server_restarts} server, {total.num_trainer_restarts} trainer and "
        f"{total.num_generator_restarts} generator restarts, {len(total.failures)} failures; "
        f"{seconds:.1f} s, {total.num_schedules / seconds:.0f} schedules/s"
    )
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
