"""The last words of `run`: what was learned, how stale, how busy, and whether the books balance."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.analysis.audit import AuditReport, audit
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.errors import ExitCode
from async_grpo.launch.alone import holds_run
from async_grpo.launch.status import dropped_groups, read_metrics, utilization
from async_grpo.launch.supervisor import Outcome
from async_grpo.replay_parts import RoleStatus

_NUM_STEPS = 10


@dataclass(frozen=True)
class Summary:
    """What to print, and the verdict in it."""

    text: str
    audit_ok: bool
    """nothing spoke against it"""


def summarize(
    config: Config, directory: RunDirectory, outcome: Outcome, last_seen: Mapping[str, RoleStatus]
) -> Summary:
    """Read the run directory; `last_seen` is each role's last word of itself."""
    written = read_metrics(directory.metrics)
    steps = [line for line in written if "reward/mean" in line]
    lines = ["", f"{outcome.cause}; summary of {directory.root}"]
    lines.append(f"  steps        {len(steps)} of {config.run.num_train_steps}")
    if steps:
        lines += _learning(steps)
    lines += _evaluations(written)
    lines += _busy(last_seen)
    lines += [
        f"  engines      {name}: {status.metrics['engines_given_up']:.0f} of "
        f"{status.metrics['engines']:.0f} given up"
        for name, status in last_seen.items()
        if status.metrics.get("engines_given_up")
    ]
    lines += [
        f"  last error   {name}: {' '.join(status.last_error.split())}"
        for name, status in last_seen.items()
        if status.last_error
    ]
    restarts = ", ".join(f"{name} {count}" for name, count in outcome.restarts.items())
    lines.append(f"  restarts     {restarts or 'none'}")
    if outcome.killed:
        lines.append(f"  killed       {', '.join(outcome.killed)}: did not end in time")
    if not holds_run(directory):
        lines.append("  audit        nothing to audit: no ticket was handed out")
        return Summary("\n".join(lines), audit_ok=True)
    if outcome.code is ExitCode.INTERRUPTED:  # who presses Ctrl-C does not wait for a long proof
        lines.append(f"  audit        not made now: async-grpo audit {directory.root}")
        return Summary("\n".join(lines), audit_ok=True)
    report = audit(directory.root)
    lines += _books(report)
    return Summary("\n".join(lines), report.ok)


def _learning(steps: list[dict[str, Any]]) -> list[str]:
    first, last = (
        _mean(steps[:_NUM_STEPS], "reward/mean"),
        _mean(steps[-_NUM_STEPS:], "reward/mean"),
    )
    num = min(_NUM_STEPS, len(steps))
    staleness = _mean(steps, "staleness/mean")
    worst = max((step.get("staleness/max", 0) for step in steps), default=0)
    seconds = steps[-1].get("time/wall_s", 0.0)
    return [
        f"  reward       {_figure(first)} (first {num} steps) -> {_figure(last)} (last {num})",
        f"  staleness    {_figure(staleness)} mean, {worst:g} at most",
        f"  train time   {seconds:.1f} s",
    ]


def _evaluations(written: list[dict[str, Any]]) -> list[str]:
    """The first and the last evaluation that had a result."""
    found = [
        f"{line['eval/reward_mean']:.3f} (version {line['eval/policy_version']:g})"
        for line in written
        if "eval/reward_mean" in line
    ]
    return [f"  evaluation   {' -> '.join(found[:1] + found[1:][-1:])}"] if found else []


def _mean(steps: list[dict[str, Any]], name: str) -> float | None:
    values = [step[name] for step in steps if step.get(name) is not None]
    return sum(values) / len(values) if values else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _busy(last_seen: Mapping[str, RoleStatus]) -> list[str]:
    """Share of its time since start-up that each role worked, by its own account."""
    shares = []
    for name, status in last_seen.items():
        busy = utilization(status)
        shares.append(f"{name} {'-' if busy is None else f'{busy:.0%}'}")
    return [f"  busy         {', '.join(shares) or 'unknown: no heartbeat was seen'}"]


def _books(report: AuditReport) -> list[str]:
    lines = [
        f"  groups       {report.tickets} tickets = {report.trained} trained + "
        f"{dropped_groups(report.dropped)} + {report.open} open; "
        f"{sum(report.reissued.values())} reissued",
        f"  audit        {'ok' if report.ok else 'NOT OK'}",
    ]
    return lines + [f"    {problem}" for problem in report.problems]
