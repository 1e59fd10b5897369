"""A few completions for people to read: `samples.jsonl`, bounded per policy version.

Written where the text is: by the generator, when the fate of a group is known, so that groups which
never reach the trainer can be read too. Of each group the worst and the best completion are kept.
Several generators may append to one file: each line is one write.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from async_grpo.generation.sampler import Sampled
from async_grpo.types import Prompt, RewardOutcome, Ticket, TicketKind

MAX_TEXT_CHARACTERS = 4000
"""Of a prompt or completion; of a longer one the middle is left out."""

Score = tuple[RewardOutcome, float, dict[str, float]]


@dataclass(slots=True, frozen=True)
class ScoredGroup:
    """All completions of a group, before it is known what becomes of them."""

    ticket: Ticket
    prompt: Prompt
    members: Sequence[Sampled]
    texts: Sequence[str]
    scores: Sequence[Score]


class SampleLog:
    """Appends to one file. Use as a context manager.

    Args:
        path: of the file.
        generator: who writes.
        max_per_version: completions written per kind of ticket and policy version; 0: none, and no
            file.
    """

    def __init__(self, path: Path, *, generator: str, max_per_version: int) -> None:
        self._generator = generator
        self._max = max_per_version
        self._newest: dict[TicketKind, int] = {}
        self._num_written: dict[TicketKind, int] = {}
        self._encode = msgspec.json.Encoder().encode
        self._file = None
        if max_per_version:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        """The log itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def finished(self, group: ScoredGroup, outcome: str) -> None:
        """The group ended as `outcome`; write its worst and its best completion, within bounds.

        A group of an earlier policy version than the newest one is passed over.
        """
        if self._file is None:
            return
        kind = group.ticket.kind
        version = _newest_version(group)
        newest = self._newest.get(kind, -1)
        if version < newest:
            return
        if version > newest:
            self._newest[kind], self._num_written[kind] = version, 0
        for member in _extremes(group.scores):
            if self._num_written[kind] < self._max:
                self._num_written[kind] += 1
                line = self._encode(self._line(group, member, version, outcome))
                self._file.write(line + b"\n")

    def _line(self, group: ScoredGroup, member: int, version: int, outcome: str) -> dict[str, Any]:
        sampled, text = group.members[member], group.texts[member]
        reward_outcome, reward, parts = group.scores[member]
        completion = sampled.completion
        return {
            "policy_version": version,
            "kind": group.ticket.kind.value,
            "outcome": outcome,
            "group_id": group.ticket.group_id,
            "attempt": group.ticket.attempt,
            "prompt_index": group.ticket.prompt_index,
            "prompt": _shortened(group.prompt.text),
            "answer": _shortened(group.prompt.answer),
            "text": _shortened(text),
            "num_tokens": completion.num_tokens,
            "finish_reason": completion.finish_reason.value,
            "reward_outcome": reward_outcome.value,
            "reward": reward if reward == reward else None,  # NaN: there is none
            "reward_parts": parts,
            "segments": [
                {
                    "weights": None if segment.weights is None else str(segment.weights),
                    "num_tokens": segment.num_tokens,
                    "kv_mixed": segment.kv_mixed,
                }
                for segment in completion.segments
            ],
            "generator": self._generator,
            "engine_id": sampled.engine_id,
        }


def _newest_version(group: ScoredGroup) -> int:
    return max(
        segment.weights.policy_version
        for member in group.members
        for segment in member.completion.segments
        if segment.weights is not None
    )


def _extremes(scores: Sequence[Score]) -> list[int]:
    """Positions of the worst and the best completion; one if they are the same."""
    rewards = [reward if reward == reward else float("-inf") for _, reward, _ in scores]
    worst, best = rewards.index(min(rewards)), rewards.index(max(rewards))
    return sorted({worst, best})


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARACTERS:
        return text
    half = MAX_TEXT_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
