"""The first twelve minutes on one card: everything that a machine without one cannot show.

    python tools/gpu_day.py --out runs/gpu_day --engine-python .venv-sglang-gpu/bin/python
    python tools/gpu_day.py --cpu --out runs/cpu_day                  # tiny shapes, on the CPU
    python tools/gpu_day.py --parts step,step_checkpointed --peak-flops 989e12

Each part is a process of its own with its own deadline. One that fails, or is late, is recorded
with its error, and the others go on. Figures go to OUT/figures.json and, as a table that can be
pasted into docs/gpu.md, to OUT/figures.md. Logs are beside them. Exits 1 if a part failed.

Without --engine-python the engine is the embedded one, and the table says so.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gpu_day_engine
import gpu_day_parts
from gpu_day_parts import Settings

from async_grpo.transport.parent import exit_with_parent, start_child

KILL_S = 10.0
"""From SIGTERM to SIGKILL."""
LEAST_S = 5.0
"""With less time left a part is not begun."""


@dataclass
class Record:
    """What became of one part."""

    name: str
    status: str
    """ok, failed, late, or not run"""
    seconds: float = 0.0
    limit_s: float = 0.0
    error: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class Day:
    """Runs parts one after the other, within `limit_s` seconds together.

    `script` does one part: this file.
    """

    def __init__(self, settings: Settings, limit_s: float, script: str = __file__) -> None:
        self._settings = settings
        self._script = script
        self._ends_s = time.monotonic() + limit_s
        self._place = Path(settings.directory)
        self.records: list[Record] = []

    def run(self, names: Sequence[str]) -> None:
        """Do `names`, in the order in which `PARTS` has them."""
        on_engine = [name for name in gpu_day_parts.PARTS if name in names and _needs_engine(name)]
        for name in gpu_day_parts.PARTS:
            if name in names and name not in on_engine:
                self._note(self._run_part(name))
        if on_engine:
            with self._engine() as started:
                self._note(started)
                for name in on_engine:
                    if started.status == "ok":
                        self._note(self._run_part(name))
                    else:
                        self._note(Record(name, "not run", error="there is no engine"))

    def _note(self, record: Record) -> None:
        self.records.append(record)
        said = record.error or ", ".join(f"{k} {show(v)}" for k, v in record.figures.items())
        print(f"{record.name:18} {record.status:8} {record.seconds:6.1f} s  {said}", flush=True)

    def _limit_s(self, own_s: float) -> float:
        return min(own_s, self._ends_s - time.monotonic())

    def _run_part(self, name: str) -> Record:
        limit_s = self._limit_s(gpu_day_parts.PARTS[name].limit_s)
        if limit_s < LEAST_S:
            return Record(name, "not run", error="no time was left")
        result, log = self._place / f"{name}.json", self._place / f"{name}.log"
        result.unlink(missing_ok=True)
        self._settings.limit_s = limit_s
        args = [sys.executable, self._script, "--part", name, "--result", str(result)]
        args += ["--settings", json.dumps(asdict(self._settings))]
        started_s = time.monotonic()
        with log.open("wb") as output:
            process = start_child(args, env=environment(), stdout=output, stderr=output)
            late = not _ended(process, limit_s)
        record = Record(name, "ok", time.monotonic() - started_s, limit_s)
        if late:
            record.status, record.error = "late", f"not done within {limit_s:.0f} s; see {log}"
        elif process.returncode:
            cause = last_line(log)
            record.status, record.error = "failed", f"exit code {process.returncode}: {cause}"
        else:
            record.figures = json.loads(result.read_text())
            record.status = record.figures.pop("status", "ok")
            record.error = record.figures.pop("error", "")
        return record

    @contextmanager
    def _engine(self) -> Iterator[Record]:
        """One server for all parts that need one, and what became of its start."""
        limit_s = self._limit_s(gpu_day_engine.START_S)
        kind = "sglang" if self._settings.engine_python else "embedded"
        record = Record(f"engine: {kind}", "failed", limit_s=limit_s)
        started_s = time.monotonic()
        log = self._place / "engine.log"
        with log.open("wb") as output:
            process = start_child(
                gpu_day_engine.command(self._settings),
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=output,
            )
            try:
                url = gpu_day_engine.first_url(process, limit_s)
                record.seconds = time.monotonic() - started_s
                if url:
                    self._settings.engine_url = url
                    record.status = "ok"
                else:
                    record.error = f"no address within {limit_s:.0f} s: {last_line(log)}"
                yield record
            finally:
                _end(process)


def _needs_engine(name: str) -> bool:
    return gpu_day_parts.PARTS[name].needs_engine


def environment() -> dict[str, str]:
    """Of every process that is started here."""
    repository = str(Path(__file__).resolve().parents[1])
    paths = [repository, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def _ended(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    """Wait for it; False: it was late, and has been ended."""
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End it and its group, politely at first, and free its pipes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "its log is empty")[:300]


def show(value: Any) -> str:
    """A figure for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def to_markdown(records: Sequence[Record], where: str) -> str:
    """The table of docs/gpu.md, section Figures."""
    rows = [f"Measured by `tools/gpu_day.py` on: {where}.", ""]
    rows += ["| part | | s | figures |", "|---|---|---|---|"]
    for record in records:
        figures = "; ".join(f"{name} {show(value)}" for name, value in record.figures.items())
        said = "; ".join(part for part in (record.error.replace("|", "/"), figures) if part)
        rows.append(f"| {record.name} | {record.status} | {record.seconds:.1f} | {said} |")
    return "\n".join(rows) + "\n"


def main(args: Sequence[str] | None = None) -> int:
    """Exit code."""
    exit_with_parent()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_day"))
    parser.add_argument("--parts", default=",".join(gpu_day_parts.PARTS), help="a,b,c; all of them")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--engine-python", default="", help="interpreter of SGLang's environment")
    parser.add_argument("--peak-flops", type=float, default=0.0, help="of the card, in bfloat16")
    parser.add_argument("--limit-s", type=float, default=690.0, help="for all parts together")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.part:
        settings = Settings(**json.loads(options.settings))
        figures = gpu_day_parts.PARTS[options.part].run(settings)
        options.result.write_text(json.dumps(figures))
        return 0
    names = options.parts.split(",")
    if unknown := sorted(set(names) - set(gpu_day_parts.PARTS)):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(gpu_day_parts.PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        directory=str(options.out.resolve()),
        cpu=options.cpu or not gpu_day_parts.has_card(),
        engine_python=options.engine_python,
        peak_flops=options.peak_flops,
    )
    day = Day(settings, options.limit_s)
    where = gpu_day_parts.describe_machine(settings)
    print(where, flush=True)
    try:
        day.run(names)
    finally:
        parts = [asdict(record) for record in day.records]
        content = json.dumps({"machine": where, "parts": parts}, indent=1)
        (options.out / "figures.json").write_text(content + "\n")
        (options.out / "figures.md").write_text(to_markdown(day.records, where))
    print(f"wrote {options.out / 'figures.json'} and {options.out / 'figures.md'}")
    return int(any(record.status in ("failed", "late") for record in day.records))


if __name__ == "__main__":
    sys.exit(main())
