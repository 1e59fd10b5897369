"""Questions made into prompts: token ids are decided here, once, and are the truth from then on."""

import hashlib
import heapq
import json

from async_grpo.errors import ConfigError
from async_grpo.interfaces import Task, Tokenizer
from async_grpo.replay_parts import Dataset
from async_grpo.types import Prompt, TicketKind

_NUM_LOOKED_AT = 10_000
"""Prompts among which the longest one is sought: a task may have billions."""
_NUM_COUNTED = 8
"""Of these, the ones with the most characters that are made into tokens to be counted."""


class PromptSource:
    """The prompts of one task for one model.

    Args:
        task: the questions.
        tokenizer: of the policy.
        chat_template: wrap each question in the tokenizer's chat format.
        system_prompt: system message of the chat; empty: none.
        held_out: the questions of eval tickets; None: there are no such tickets.

    Raises:
        ConfigError: the first prompt cannot be made, or would begin with two BOS tokens.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        *,
        chat_template: bool = False,
        system_prompt: str = "",
        held_out: Task | None = None,
    ) -> None:
        self._task = task
        self._held_out = held_out
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._system_prompt = system_prompt
        self._first = self.prompt(0)

    def prompt(self, index: int, kind: TicketKind = TicketKind.TRAIN) -> Prompt:
        """Prompt `index` of those to train on, or of those held out.

        Raises:
            ConfigError: it is empty, its BOS tokens are not exactly as the model expects, or
                nothing is held out.
            IndexError: there is no such prompt.
        """
        question, answer, metadata = self._part(kind).question(index)
        text = self._chat_text(question) if self._chat_template else question
        return Prompt(
            index=index,
            text=text,
            token_ids=self._token_ids(text, index),
            answer=answer,
            metadata=metadata,
        )

    def longest(self, kind: TicketKind = TicketKind.TRAIN) -> Prompt:
        """The prompt with the most tokens, as far as that can be told in a second or so.

        Of the first `_NUM_LOOKED_AT` prompts the `_NUM_COUNTED` with the most characters are
        tokenized.

        Raises:
            ConfigError: as `prompt`.
        """
        task = self._part(kind)

        def num_characters(index: int) -> int:
            return len(task.question(index)[0])

        looked_at = range(min(len(task), _NUM_LOOKED_AT))
        indices = heapq.nlargest(_NUM_COUNTED, looked_at, key=num_characters)
        return max(
            (self.prompt(index, kind) for index in indices),
            key=lambda prompt: len(prompt.token_ids),
        )

    def dataset(self) -> Dataset:
        """What all generators must agree on: the task, and how its prompts become ids."""
        shape = json.dumps(
            [
                self._task.fingerprint(),
                self._held_out.fingerprint() if self._held_out else None,
                self._chat_template,
                self._first.text,
                self._first.token_ids,
            ]
        )
        return Dataset(
            fingerprint=hashlib.sha256(shape.encode()).hexdigest()[:16], num_prompts=len(self._task)
        )

    def _part(self, kind: TicketKind) -> Task:
        if kind is TicketKind.TRAIN:
            return self._task
        if self._held_out is None:
            raise ConfigError("eval: this generator holds no prompts out")
        return self._held_out

    def _chat_text(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        if self._system_prompt:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return text

    def _token_ids(self, text: str, index: int) -> list[int]:
        """Ids of `text` with exactly one BOS, if the tokenizer adds one at all.

        Chat templates may or may not write it themselves. No other special token is added: an EOS
        behind the prompt would end the answer before it began.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        bos = self._tokenizer.bos_token_id
        if bos is not None:
            if self._tokenizer.adds_bos and ids[:1] != [bos]:
                ids = [bos, *ids]
            if ids[:2] == [bos, bos]:
                raise ConfigError(
                    f"task: prompt {index} begins with two BOS tokens; remove the one in its text"
                )
        if not ids:
            raise ConfigError(f"task: prompt {index} has no tokens")
        return ids
