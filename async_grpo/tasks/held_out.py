"""A task in two: prompts to train on, and prompts that training never sees.

The text of a prompt decides its side, by a hash, so that equal prompts at different indices are on
the same side: no evaluation prompt is ever trained on. Nothing is listed: a task of any size splits
at no cost for training, which steps over held-out prompts.
"""

import hashlib
from typing import Any

from async_grpo.config.eval import EvalSection
from async_grpo.errors import ConfigError
from async_grpo.interfaces import Reward, Task

_MOST_LOOKS = 2_000_000
"""Indices that are looked at for held-out prompts before the search is given up."""


class TrainingPart:
    """The task without its held-out prompts; a held-out index stands for the next one that is not.

    Args:
        task: the whole.
        split: what is held out.
    """

    def __init__(self, task: Task, split: "Split") -> None:
        self._task, self._split = task, split

    def __len__(self) -> int:
        """Number of indices, as of the whole task."""
        return len(self._task)

    def fingerprint(self) -> str:
        """Of the whole task and of how it is split."""
        return f"{self._task.fingerprint()} {self._split}"

    def question(self, index: int) -> tuple[str, str, dict[str, Any]]:
        """The first prompt at or behind `index`, cyclically, that is not held out.

        Raises:
            ConfigError: all are held out.
        """
        size = len(self._task)
        for step in range(min(size, _MOST_LOOKS)):
            question = self._task.question((index + step) % size)
            if not self._split.holds_out(question[0]):
                return question
        raise ConfigError(
            "eval.held_out_fraction leaves no prompt to train on: the task has too few "
            "different prompts"
        )

    @property
    def reward(self) -> Reward:
        """The task's own."""
        return self._task.reward


class HeldOutPart:
    """`num_prompts` different held-out prompts, the first ones by index.

    Raises:
        ConfigError: the task has fewer.
    """

    def __init__(self, task: Task, split: "Split", num_prompts: int) -> None:
        self._task, self._split = task, split
        self._indices: list[int] = []
        texts: set[str] = set()
        for index in range(min(len(task), _MOST_LOOKS)):
            text = task.question(index)[0]
            if split.holds_out(text) and text not in texts:
                texts.add(text)
                self._indices.append(index)
                if len(self._indices) == num_prompts:
                    return
        raise ConfigError(
            f"eval.num_prompts ({num_prompts}) exceeds the {len(texts)} different prompts that "
            f"eval.held_out_fraction ({split.fraction:g}) holds out of the task; lower the one or "
            "raise the other"
        )

    def __len__(self) -> int:
        """Number of held-out prompts."""
        return len(self._indices)

    def fingerprint(self) -> str:
        """Of the whole task, the split and the number."""
        return f"{self._task.fingerprint()} {self._split} {len(self)}"

    def question(self, index: int) -> tuple[str, str, dict[str, Any]]:
        """Held-out prompt `index`."""
        return self._task.question(self._indices[index])

    @property
    def reward(self) -> Reward:
        """The task's own."""
        return self._task.reward


class Split:
    """Which texts are held out: a share `fraction` of all, by a hash salted with the seed."""

    def __init__(self, *, seed: int, fraction: float) -> None:
        self.seed, self.fraction = seed, fraction
        self._threshold = int(fraction * 2**64)

    def holds_out(self, text: str) -> bool:
        """Whether a prompt of this text is kept from training."""
        digest = hashlib.blake2b(f"{self.seed} {text}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._threshold

    def __str__(self) -> str:
        return f"without {self.fraction:g} by seed {self.seed}"


def split_task(task: Task, section: EvalSection, seed: int) -> tuple[Task, Task | None]:
    """(what to train on, what to evaluate on); without evaluation the whole task and None.

    Raises:
        ConfigError: too few different prompts are held out.
    """
    if not section.every:
        return task, None
    split = Split(seed=seed, fraction=section.held_out_fraction)
    return TrainingPart(task, split), HeldOutPart(task, split, section.num_prompts)
