"""The trainer's witness, `steps.jsonl`: what each step trained, as the payloads themselves say.

Written before the ack, so that an audit can hold it against the replay server's ledger.
"""

import json
from pathlib import Path
from typing import Any

from async_grpo.metrics.json_lines import cut_torn_line
from async_grpo.training.feed import Batch


class StepWitness:
    """Appends one line per train step."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "StepWitness":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, incarnation: int, batch: Batch, max_staleness: int) -> None:
        """One line, flushed. Tokens beyond `max_staleness` were not trained, only counted."""
        version = batch.train_version
        groups: list[dict[str, Any]] = []
        for group in batch.groups:
            tokens = group.weights_tokens()
            trained = [n for n in tokens if version - n.policy_version <= max_staleness]
            oldest = min(trained, default=None)
            groups.append(
                {
                    "group_id": group.group_id,
                    "attempt": group.attempt,
                    "num_tokens": group.num_tokens,
                    "num_over_age": tokens.total() - sum(tokens[name] for name in trained),
                    "oldest": str(oldest) if oldest else None,
                    "staleness": version - oldest.policy_version if oldest else 0,
                }
            )
        line = {
            "incarnation": incarnation,
            "step": batch.train_version,
            "policy_version": batch.train_version + 1,
            "draw_number": batch.draw_number,
            "num_tokens": sum(group["num_tokens"] for group in groups),
            "max_staleness": max(group["staleness"] for group in groups),
            "groups": groups,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
