"""Task `reverse`: spell a short string backwards. Learnable by a tiny model in a minute."""

import hashlib
import random
from typing import Any

from async_grpo.interfaces import Reward
from async_grpo.tasks.rewards import exact_match


class ReverseTask:
    """Prompt `abcdef>`, answer `fedcba`, exact match.

    Args:
        seed: with the index, decides each string.
        length: letters of each string.
        alphabet: letters to draw from.
        num_prompts: size of the task.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self, *, seed: int, length: int = 6, alphabet: str = "abcdefgh", num_prompts: int = 100_000
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be >= 1, got {length}")
        if len(set(alphabet)) < 2 or ">" in alphabet:
            raise ValueError(f"alphabet must hold two different letters and no '>': {alphabet!r}")
        if num_prompts < 1:
            raise ValueError(f"num_prompts must be >= 1, got {num_prompts}")
        self._seed = seed
        self._length = length
        self._alphabet = alphabet
        self._num_prompts = num_prompts

    def __len__(self) -> int:
        """Number of prompts."""
        return self._num_prompts

    def fingerprint(self) -> str:
        """Hash of the options."""
        options = (self._seed, self._length, self._alphabet, self._num_prompts)
        return hashlib.sha256(f"reverse {options!r}".encode()).hexdigest()[:16]

    def question(self, index: int) -> tuple[str, str, dict[str, Any]]:
        """(prompt text, answer, {}) of prompt `index`."""
        letters = random.Random(f"reverse {self._seed} {index}").choices(
            self._alphabet, k=self._length
        )
        return "".join(letters) + ">", "".join(reversed(letters)), {}

    @property
    def reward(self) -> Reward:
        """Exact match."""
        return exact_match
