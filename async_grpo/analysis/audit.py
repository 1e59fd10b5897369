"""Proof of the accounting of a finished or running run, from files alone.

Three witnesses that do not trust each other: the replay server's ledger, the trainer's step log and
the generators' logs. What the ledger means is worked out here anew, without the replay core. A
process killed in the middle of a line leaves a torn last line, which is no problem.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.analysis.ledger_reading import LedgerReading
from async_grpo.analysis.witnesses import check_generators, check_steps
from async_grpo.config.load import load_config
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.staleness import OverAge
from async_grpo.errors import ConfigError

MAX_PROBLEMS_SHOWN = 50


@dataclass
class AuditReport:
    """What was counted, and everything that does not add up."""

    tickets: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """by reason"""
    open: int = 0
    reissued: dict[str, int] = field(default_factory=dict)
    """by reason"""
    steps: int = 0
    duplicates_trained: int = 0
    max_staleness_trained: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """stored; trained and over_age (masked), of surviving steps; rolled_back"""
    publish_sequence: int = 0
    evaluation: dict[str, int] = field(default_factory=dict)
    """rounds; tickets = evaluated + failed + open; apart from all figures above"""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all witnesses agree and no guarantee was broken."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """For `audit --json`."""
        return {"ok": self.ok, **asdict(self)}

    def to_text(self) -> str:
        """For people."""
        lines = [
            "audit: ok" if self.ok else f"audit: {len(self.problems)} problem(s)",
            f"  tickets {self.tickets} = trained {self.trained} + dropped "
            f"{sum(self.dropped.values())} + open {self.open}",
            f"  dropped: {_counts(self.dropped)}",
            f"  reissued: {_counts(self.reissued)}",
            f"  steps {self.steps}, highest staleness trained {self.max_staleness_trained}, "
            f"groups trained twice {self.duplicates_trained}",
            f"  tokens: {_counts(self.tokens)}",
            f"  publishes {self.publish_sequence}",
        ]
        if self.evaluation.get("tickets"):
            lines.append(f"  evaluation: {_counts(self.evaluation)}")
        lines += [f"  PROBLEM {problem}" for problem in self.problems[:MAX_PROBLEMS_SHOWN]]
        if len(self.problems) > MAX_PROBLEMS_SHOWN:
            lines.append(f"  ... and {len(self.problems) - MAX_PROBLEMS_SHOWN} more")
        return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items())) or "none"


def audit(run_dir: Path) -> AuditReport:
    """Cross-check the witnesses of the run in `run_dir`.

    Raises:
        ConfigError: the run directory has no readable config.yaml.
    """
    directory = RunDirectory(run_dir)
    if not directory.config.is_file():
        raise ConfigError(f"{directory.config} is missing: {run_dir} is no run directory")
    config = load_config(directory.config)
    problems: list[str] = []
    # Of a running run: what was acknowledged by now must be in the ledger read next, and what that
    # ledger holds was sent by the time the logs are read again.
    acknowledged = _generator_lines(directory, [])
    reading = LedgerReading(
        groups_per_step=config.replay.groups_per_step,
        max_staleness=config.staleness.max_staleness,
        masks_over_age=config.staleness.over_age is OverAge.mask_tokens,
    )
    for number, record in read_lines(directory.ledger, problems):
        reading.read(number, record)
    reading.check_end()
    problems += reading.problems
    steps = [line for _, line in read_lines(directory.steps, problems)]
    problems += check_steps(reading, steps)
    if not directory.generator_logs():
        problems.append(f"{directory.logs} holds no generator's log (*.groups.jsonl)")
    sent = _generator_lines(directory, problems)
    problems += check_generators(reading, acknowledged=acknowledged, sent=sent)
    problems += reading.evals.check_generators(sent)
    return _report(reading, problems)


def _generator_lines(directory: RunDirectory, problems: list[str]) -> list[dict[str, Any]]:
    return [line for path in directory.generator_logs() for _, line in read_lines(path, problems)]


def read_lines(path: Path, problems: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file; what is wrong with it goes to `problems`."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            if number < len(lines):  # a torn line has no line end, so it is the last of the file
                problems.append(f"{path}, line {number} is no JSON")
            continue
        if isinstance(value, dict):
            found.append((number, value))
        elif number < len(lines):
            problems.append(f"{path}, line {number} is no object")
    return found


def _report(reading: LedgerReading, problems: list[str]) -> AuditReport:
    places = Counter(ticket.place for ticket in reading.tickets.values())
    return AuditReport(
        tickets=len(reading.tickets),
        trained=places["trained"],
        dropped=dict(reading.dropped),
        open=sum(places[place] for place in ("waiting", "claimed", "stored", "leased")),
        reissued=dict(reading.reissued),
        steps=len(reading.steps),
        duplicates_trained=reading.num_duplicates,
        max_staleness_trained=reading.highest_staleness(),
        tokens=dict(reading.tokens),
        publish_sequence=reading.publish_sequence,
        evaluation=reading.evals.counts(),
        problems=problems,
    )
