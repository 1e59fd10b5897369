"""What a generator checks and waits for before its first group. Knows no message and no loop."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from async_grpo.config.schema import Config
from async_grpo.errors import ConfigError, PeerLost
from async_grpo.generation.lifecycle import EngineSlot
from async_grpo.interfaces import Clock
from async_grpo.tasks.prompts import PromptSource
from async_grpo.transport.waiting import INTERVAL_S
from async_grpo.types import TicketKind

logger = logging.getLogger(__name__)

REFUSED_S = 30.0
"""For which all engines may refuse a run that has not begun: one may still be exchanged."""


class FirstTicket:
    """The wait for an engine, a trainer and a ticket, told aloud.

    Args:
        slots: of the engines.
        timeout_s: `run.no_progress_timeout_s`.
        clock: seconds.
        update_error: why the newest update that failed did.

    Attributes:
        arrived: set by the generator when it has its first ticket.
        trainer_seen: set by the generator when there are live weights.
    """

    def __init__(
        self,
        slots: Callable[[], Sequence[EngineSlot]],
        timeout_s: float,
        clock: Clock,
        update_error: Callable[[], str],
    ) -> None:
        self._slots, self._update_error = slots, update_error
        self._timeout_s = timeout_s
        self._clock = clock
        self._left_s = timeout_s
        self.arrived = asyncio.Event()
        self.trainer_seen = False

    async def wait(self, interval_s: float = INTERVAL_S) -> None:
        """Return with the first ticket; a line every `interval_s` until then.

        Raises:
            PeerLost: no engine or no trainer within `timeout_s`, or all engines refuse the run for
                `REFUSED_S`. A full buffer is no reason.
        """
        deadline = self._clock() + self._timeout_s
        while not self.arrived.is_set():
            try:
                async with asyncio.timeout(min(interval_s, self._timeout_s)):
                    await self.arrived.wait()
            except TimeoutError:
                self._say(deadline - self._clock())

    def _say(self, left_s: float) -> None:
        whom = self._waits_for()
        if not all(slot.refused or slot.failed for slot in self._slots()):
            self._left_s = left_s
        elif self._left_s - left_s > REFUSED_S:
            raise PeerLost(f"every engine refuses this run: {self._errors()}")
        if not whom:
            logger.info("waiting for a ticket: the buffer is full, or no prompt is left")
        elif left_s > 0:
            logger.info("waiting for %s; %.0f s left (run.no_progress_timeout_s)", whom, left_s)
        else:
            raise PeerLost(f"waited {self._timeout_s:.0f} s in vain for {whom}")

    def _waits_for(self) -> str:
        slots = self._slots()
        if all(slot.engine is None for slot in slots):
            return f"an engine to answer ({self._errors() or 'still starting'})"
        if self.trainer_seen:
            return ""
        error = self._update_error()
        return "a trainer to publish its first weights" + (f" ({error})" if error else "")

    def _errors(self) -> str:
        return "; ".join(slot.last_error for slot in self._slots() if slot.last_error)


class Room:
    """Whether the longest prompts and their completions have room in a context.

    A prompt without room would end as `generation_failed` each time it is handed out.

    Args:
        config: how long completions may be.
        prompts: of the task.

    Raises:
        ConfigError: a prompt cannot be made.
    """

    def __init__(self, config: Config, prompts: PromptSource) -> None:
        budget, field = config.generation.max_new_tokens, "generation.max_new_tokens"
        self._needs = [(prompts.longest(), budget, field)]
        if config.eval.every:
            if config.eval.max_new_tokens:
                budget, field = config.eval.max_new_tokens, "eval.max_new_tokens"
            self._needs.append((prompts.longest(TicketKind.EVAL), budget, field))

    def require(self, context_length: int | None, whose: str) -> None:
        """Refuse a context that is too short; None: it is not known.

        Args:
            context_length: in tokens.
            whose: names it in the message.

        Raises:
            ConfigError: names the prompt and all figures.
        """
        for prompt, budget, field in self._needs:
            num_tokens = len(prompt.token_ids)
            if context_length and num_tokens + budget > context_length:
                raise ConfigError(
                    f"{whose} ({context_length}) is below the {num_tokens} tokens of prompt "
                    f"{prompt.index} plus {field} ({budget}): raise it, or shorten prompts or "
                    "completions"
                )
