"""Task `jsonl`: prompts and answers from a file, one JSON object per line."""

import hashlib
import json
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigError
from async_grpo.interfaces import Reward
from async_grpo.tasks.rewards import exact_match

MAX_LINE_BYTES = 1 << 20
MAX_PROBLEMS = 20
"""Complaints listed before the rest is only counted."""

Row = tuple[str, str, dict[str, Any]]


class JsonlTask:
    """Rows `{"prompt": str, "answer": str or number, ...}`; other fields are metadata.

    The whole file is checked at the start: a bad row ten hours into a run helps nobody.

    Args:
        seed: has no effect; the order of prompts is the replay server's.
        path: the file, UTF-8, with or without a byte order mark; blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, holds no row, or holds bad rows; each as `file:line`.
    """

    def __init__(self, *, seed: int, path: str) -> None:
        del seed
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"task.options.path: cannot read {path}: {error.strerror}") from error
        self._fingerprint = hashlib.sha256(content).hexdigest()[:16]
        self._rows: list[Row] = []
        problems: list[str] = []
        for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                self._rows.append(_parse_row(line))
            except ValueError as error:
                problems.append(f"{path}:{number}: {error}")
        if len(problems) > MAX_PROBLEMS:
            more = len(problems) - MAX_PROBLEMS
            problems = [*problems[:MAX_PROBLEMS], f"{path}: and {more} more bad rows"]
        if not problems and not self._rows:
            problems = [f"task.options.path: {path} holds no prompts"]
        if problems:
            raise ConfigError(problems)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def fingerprint(self) -> str:
        """Hash of the file."""
        return self._fingerprint

    def question(self, index: int) -> Row:
        """(prompt, answer, other fields) of row `index`."""
        return self._rows[index]

    @property
    def reward(self) -> Reward:
        """Exact match; `task.reward` replaces it."""
        return exact_match


def _parse_row(line: bytes) -> Row:
    """One line.

    Raises:
        ValueError: says what is wrong with it.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"the line has {len(line)} bytes, more than {MAX_LINE_BYTES}")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise ValueError(f"must be an object, got {type(row).__name__}")
    prompt, answer = row.pop("prompt", None), row.pop("answer", None)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("'prompt' must be a non-empty string")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError("'answer' must be a string or a number")
    if not str(answer).strip():
        raise ValueError("'answer' is empty")
    return prompt, str(answer), row
