"""The replay core under simulated faults, and the simulation under planted bugs."""

import os

import pytest

from async_grpo.replay.core.core import ReplayCore
from tests.simulation.mutants import MUTANTS
from tests.simulation.run import Run, simulate

NUM_SCHEDULES = int(os.environ.get("SIMULATION_SCHEDULES", "5000"))
NUM_SLICES = 25
WITHIN = 1000
"""schedules in which every planted bug must show"""
FAILED_ONCE = [57216, 31089, 42863, 56506, 76925]
"""Seeds that found faults: weights that an engine served already did not go live; forced staleness
drawn by ticket passed over the oldest group (the last four)."""


@pytest.mark.parametrize("part", range(NUM_SLICES))
def test_no_schedule_breaks_a_guarantee(part: int) -> None:
    outcome = simulate(range(part, NUM_SCHEDULES, NUM_SLICES))

    assert outcome.failures == []
    assert outcome.num_server_restarts > 0
    assert outcome.num_trainer_restarts > 0
    assert outcome.num_generator_restarts > 0


def test_seeds_that_failed_once_pass() -> None:
    assert simulate(FAILED_ONCE).failures == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_planted_bug_is_found_and_its_seed_repeats_it(mutant: type[ReplayCore]) -> None:
    failures = next(
        (found for seed in range(WITHIN) if (found := simulate([seed], mutant).failures)), []
    )

    assert failures, f"{mutant.__name__} survived {WITHIN} schedules"
    assert simulate([failures[0][0]], mutant).failures == failures


def test_equal_seeds_give_equal_runs() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        Run(7, trace=trace.append).run()

    assert traces[0] == traces[1]
    assert len(traces[0]) > 100
