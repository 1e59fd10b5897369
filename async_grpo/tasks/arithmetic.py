"""Task `arithmetic`: sums and differences, asked in words, for a model that can chat."""

import hashlib
import random
from typing import Any

from async_grpo.interfaces import Reward
from async_grpo.tasks.rewards import last_integer

_APPLY = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


class ArithmeticTask:
    """`What is 17 + 25? Reply with the number only.`; the last integer of the reply counts.

    Args:
        seed: with the index, decides each question.
        min_operand: smallest operand.
        max_operand: largest operand.
        operations: characters out of `+-*`.
        num_prompts: size of the task.
        wording: text of a question; `{expression}` stands for `17 + 25`.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        *,
        seed: int,
        min_operand: int = 1,
        max_operand: int = 50,
        operations: str = "+-",
        num_prompts: int = 100_000,
        wording: str = "What is {expression}? Reply with the number only.",
    ) -> None:
        if min_operand > max_operand:
            raise ValueError(f"min_operand ({min_operand}) exceeds max_operand ({max_operand})")
        if not operations or set(operations) - set(_APPLY):
            raise ValueError(f"operations must be characters out of '+-*', got {operations!r}")
        if num_prompts < 1:
            raise ValueError(f"num_prompts must be >= 1, got {num_prompts}")
        if "{expression}" not in wording:
            raise ValueError(f"wording must contain {{expression}}, got {wording!r}")
        self._seed = seed
        self._range = (min_operand, max_operand)
        self._operations = operations
        self._num_prompts = num_prompts
        self._wording = wording

    def __len__(self) -> int:
        """Number of prompts."""
        return self._num_prompts

    def fingerprint(self) -> str:
        """Hash of the options."""
        options = (self._seed, self._range, self._operations, self._num_prompts, self._wording)
        return hashlib.sha256(f"arithmetic {options!r}".encode()).hexdigest()[:16]

    def question(self, index: int) -> tuple[str, str, dict[str, Any]]:
        """(question, answer, {"expression"}) of prompt `index`."""
        chance = random.Random(f"arithmetic {self._seed} {index}")
        left, right = chance.randint(*self._range), chance.randint(*self._range)
        operation = chance.choice(self._operations)
        expression = f"{left} {operation} {right}"
        answer = _APPLY[operation](left, right)
        text = self._wording.replace("{expression}", expression)
        return text, str(answer), {"expression": expression}

    @property
    def reward(self) -> Reward:
        """The last integer of the reply."""
        return last_integer
