"""Forced staleness in whole runs of real processes."""

import pytest
from real_run import RealRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.mark.parametrize("k", [0, 2])
def test_forced_staleness_is_exact(real_run: RealRun, k: int) -> None:
    real_run.start(f"staleness.force={k}", "staleness.max_staleness=4", num_steps=k + 4)
    assert real_run.finish() == 0, real_run.output()

    found = [(step["staleness/mean"], step["staleness/max"]) for step in real_run.steps()]
    assert found == [(min(step, k), min(step, k)) for step in range(k + 4)]
    report = real_run.audit()
    assert report.ok, report.problems
    assert report.max_staleness_trained == k
    assert report.dropped == {}
    assert real_run.left_over() == []
