"""Section `task`: prompts and rewards."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from async_grpo.config.ranges import positive


@dataclass(kw_only=True)
class TaskSection:
    """Prompts and rewards."""

    name: str
    """A registered task (reverse, arithmetic, jsonl) or `package.module:attribute`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the task's constructor as keywords."""
    reward: str = ""
    """`package.module:attribute` of a reward that replaces the task's own; empty: the task's."""
    reward_timeout_s: float = 5.0
    """Budget of one completion; past it the worker is killed."""
    reward_workers: int = 1
    """Processes per generator that score completions."""
    unparseable_reward: float | None = None
    """Reward of a completion without a readable answer; null: its group ends as reward_failed."""
    chat_template: bool = False
    """Wrap each prompt in the tokenizer's chat template."""
    system_prompt: str = ""
    """System message, with `chat_template`."""

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from positive(where, self, "reward_timeout_s", "reward_workers")
        if self.reward and ":" not in self.reward:
            yield f"{where}.reward must be package.module:attribute, got {self.reward!r}"
        if self.system_prompt and not self.chat_template:
            yield f"{where}.system_prompt has no effect without {where}.chat_template=true"
