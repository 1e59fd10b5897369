"""Where metrics go: `metrics.jsonl` and TensorBoard."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from async_grpo.metrics.json_lines import keep_lines
from async_grpo.metrics.registry import checked


class MetricsWriter:
    """Writes one line per train step, flushed, and the same to TensorBoard.

    Of steps that were undone, because the trainer fell back to a checkpoint, the lines are removed
    (`steps.jsonl` and the ledger still tell of them), and TensorBoard hides the points.
    """

    def __init__(self, jsonl: Path, tensorboard: Path | None, *, first_step: int = 0) -> None:
        """Open both; `first_step`: the first step that will be written."""
        jsonl.parent.mkdir(parents=True, exist_ok=True)
        keep_lines(jsonl, lambda line: line.get("policy_version", 0) <= first_step)
        self._file = jsonl.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter  # imports seconds of other packages

            self._board = SummaryWriter(str(tensorboard), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One train step.

        Args:
            step: x axis of TensorBoard; figures of an evaluation are at the version evaluated.
            values: name -> value; what is not a number (a mean of nothing) is left out.

        Raises:
            KeyError: an undeclared name.
        """
        line = checked(values)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            evaluated = line.get("eval/policy_version", step)
            for name, value in line.items():
                at = evaluated if name.startswith("eval/") else step
                self._board.add_scalar(name, value, int(at))

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
