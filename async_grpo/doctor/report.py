"""What the checks found, for people and for programs. Knows no engine and no model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from async_grpo.errors import ExitCode

_NAME_WIDTH = 18


class Verdict(StrEnum):
    """Of one check."""

    OK = "ok"
    FAIL = "FAIL"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Verdict
    figure: str
    """what was measured, or why nothing was"""
    advice: str = ""
    """what to do"""
    values: dict[str, float] = field(default_factory=dict)
    """the measured numbers by name: log-probs in nats, durations (`_s`) in seconds"""
    engine: str = ""
    """its URL; empty: the check concerns no engine"""


def ok(check: str, figure: str, values: dict[str, float] | None = None) -> Finding:
    """It is as it should be."""
    return Finding(check=check, verdict=Verdict.OK, figure=figure, values=values or {})


def fail(check: str, figure: str, advice: str, values: dict[str, float] | None = None) -> Finding:
    """A run would go wrong."""
    return Finding(
        check=check, verdict=Verdict.FAIL, figure=figure, advice=advice, values=values or {}
    )


def skipped(check: str, reason: str) -> Finding:
    """Nothing was measured."""
    return Finding(check=check, verdict=Verdict.SKIPPED, figure=reason)


@dataclass(frozen=True)
class Report:
    """All findings, in the order of the checks."""

    findings: Sequence[Finding]
    unreachable: bool = False
    """an engine did not answer, or not any more"""

    @property
    def exit_code(self) -> ExitCode:
        """3: an engine is not there; 1: a check failed; else 0."""
        if self.unreachable:
            return ExitCode.PEER
        return ExitCode.OTHER if self._count(Verdict.FAIL) else ExitCode.OK

    def to_text(self) -> str:
        """A line per check, with advice below it, under a headline per engine."""
        lines: list[str] = []
        engine = ""
        for finding in self.findings:
            if finding.engine != engine:
                engine = finding.engine
                lines.append(f"engine {engine}")
            name = f"{finding.check:<{_NAME_WIDTH}}"
            lines.append(f"{finding.verdict.value:<8}{name}{finding.figure}")
            if finding.advice:
                lines.append(f"{'':8}{'':{_NAME_WIDTH}}-> {finding.advice}")
        counts = ", ".join(f"{self._count(verdict)} {verdict.value}" for verdict in Verdict)
        return "\n".join([*lines, counts])

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "ok": self.exit_code is ExitCode.OK,
            "checks": [
                {
                    "check": finding.check,
                    "engine": finding.engine or None,
                    "verdict": finding.verdict.value.lower(),
                    "figure": finding.figure,
                    "advice": finding.advice,
                    "values": finding.values,
                }
                for finding in self.findings
            ],
        }

    def _count(self, verdict: Verdict) -> int:
        return sum(finding.verdict is verdict for finding in self.findings)
