"""The trainer's witness, `steps.jsonl`: what each step trained, as the payloads themselves say.

Written before the ack, so that an audit can hold it against the replay server's ledger.
"""

from typing import Any

from async_grpo.metrics.json_lines import JsonLinesFile
from async_grpo.training.feed import Batch


class StepWitness(JsonLinesFile):
    """One line per train step."""

    def write(self, incarnation: int, batch: Batch, max_staleness: int) -> None:
        """One line. Tokens beyond `max_staleness` were not trained, only counted."""
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
        self.append(line)
