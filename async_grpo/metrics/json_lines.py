"""JSON-lines files that outlive the processes which append to them.

A process killed in the middle of a line leaves a torn last line; whoever opens the file next cuts
it off, or its own first line would be glued to it.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
