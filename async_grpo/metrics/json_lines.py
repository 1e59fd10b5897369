"""JSON-lines files that outlive the processes which append to them.

A process killed in the middle of a line leaves a torn last line; whoever opens the file next cuts
it off, or its own first line would be glued to it.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self


class JsonLinesFile:
    """Appends objects, one per line, each handed to the operating system at once.

    One process at a time has it open. Use as a context manager.
    """

    def __init__(self, path: Path) -> None:
        """Open or create; a last line that a crash cut short is removed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        self._file = path.open("ab")

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def append(self, line: Mapping[str, Any]) -> None:
        """One line. Raises OSError (disk full)."""
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Give up the file."""
        self._file.close()


def cut_torn_line(path: Path) -> None:
    """Remove what follows the last line end; a file that is not there is no error."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    with path.open("r+b") as file:
        end = size
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Rewrite the file with the lines that `keep` wants; returns how many were dropped.

    A line that is no JSON object is dropped too. The file is whole at every moment.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _wanted(line, keep)]
    if len(kept) < len(lines):
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(b"".join(kept))
        os.replace(partial, path)
    return len(lines) - len(kept)


def _wanted(line: bytes, keep: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and keep(value)
