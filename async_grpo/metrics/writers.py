"""Where metrics go: `metrics.jsonl` and TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from async_grpo.metrics.json_lines import JsonLinesFile, keep_lines
from async_grpo.metrics.registry import checked


class MetricsWriter:
    """Writes one line per train step, flushed, and the same to TensorBoard.

    Of steps that were undone, because the trainer fell back to a checkpoint, the lines are removed
    (`steps.jsonl` and the ledger still tell of them), and TensorBoard hides the points.
    """

    def __init__(self, jsonl: Path, tensorboard: Path | None, *, first_step: int = 0) -> None:
        """Open both; `first_step`: the first step that will be written."""
        keep_lines(jsonl, lambda line: line.get("policy_version", 0) <= first_step)
        self._file = JsonLinesFile(jsonl)
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
        self._file.append(line)
        if self._board is not None:
            evaluated = line.get("eval/policy_version", step)
            for name, value in line.items():
                at = evaluated if name.startswith("eval/") else step
                self._board.add_scalar(name, value, int(at))

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Flush and close both."""
        self._file.close()
        if self._board is not None:
            self._board.close()
