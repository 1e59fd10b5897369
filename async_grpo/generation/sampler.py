"""One member of a group: sent to an engine, and to another one if that fails.

Returns only completions that may be trained as far as the engine is concerned: whole, checked, and
sampled under weights that were confirmed. Knows nothing of tickets, rewards or the replay server.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from async_grpo.config.eval import EvalSection
from async_grpo.config.generation import GenerationSection
from async_grpo.engine_api import GenerateRequest, SamplingParams
from async_grpo.errors import GenerationError
from async_grpo.generation.completions import UnknownWeights, completion_from_reply
from async_grpo.generation.engines import Engine
from async_grpo.generation.routing import Place, Placement, Router
from async_grpo.interfaces import Clock
from async_grpo.types import Completion, Int32Array, Prompt, Ticket, TicketKind

logger = logging.getLogger(__name__)

MAX_TRIES = 6
"""Of one member; waiting for an engine is no try."""
FIRST_BACKOFF_S = 0.05


@dataclass(slots=True, frozen=True)
class Sampled:
    """A completion and where and when it was sampled."""

    completion: Completion
    engine_id: str
    started_s: float
    ended_s: float


@dataclass
class GroupRequest:
    """What the members of one group share."""

    ticket: Ticket
    prompt: Prompt
    prompt_token_ids: Int32Array = field(init=False)
    largest_id: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = np.array(self.prompt.token_ids, dtype=np.int32)
        self.largest_id = max(self.prompt.token_ids)


class Sampler:
    """Samples members of groups.

    Args:
        router: where there is room.
        section: sampling parameters and deadlines.
        evaluation: sampling parameters of eval tickets, where they differ.
        stop_token_ids: end a completion.
        clock: for the times in `Sampled`.

    Attributes:
        num_retries: members that were sampled again.
    """

    def __init__(
        self,
        router: Router,
        section: GenerationSection,
        *,
        stop_token_ids: list[int],
        evaluation: EvalSection | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._router = router
        self._section = section
        self._clock = clock
        train = _sampling_params(section.max_new_tokens, section.temperature, stop_token_ids)
        self._params = {TicketKind.TRAIN: train, TicketKind.EVAL: train}
        if evaluation is not None:
            self._params[TicketKind.EVAL] = _sampling_params(
                evaluation.max_new_tokens or section.max_new_tokens,
                evaluation.temperature,
                stop_token_ids,
            )
        self._aborts: set[asyncio.Task[None]] = set()
        self.num_retries = 0

    async def sample(
        self, request: GroupRequest, member: int, place: Place, placement: Placement
    ) -> Sampled:
        """One completion of the prompt. The group's deadline is the caller's.

        Cancelling it aborts the request at the engine.

        Raises:
            GenerationError: the engine refuses the request, or too many tries failed.
        """
        backoff_s = FIRST_BACKOFF_S
        for attempt in range(MAX_TRIES):
            rid = f"{request.ticket.group_id}-{request.ticket.attempt}-{member}"
            if attempt:
                rid += f"-{attempt}"
            try:
                async with place as engine:
                    sampled = await self._sample_on(engine, request, rid)
                if await engine.cleared():
                    return sampled
                problem = f"engine {engine.engine_id} was lost, or failed the probe of its update"
            except GenerationError as error:
                if not error.retryable or attempt + 1 == MAX_TRIES:
                    raise
                problem = str(error)
            self.num_retries += 1
            # the slot says once why an engine was lost; its many requests need not
            logger.debug("request %s is sampled again: %s", rid, problem)
            await asyncio.sleep(backoff_s)
            backoff_s *= 2
            place = self._router.enqueue(placement, first=True)
        raise GenerationError(
            f"member {member} failed {MAX_TRIES} times, last: {problem}", retryable=False
        )

    async def _sample_on(self, engine: Engine, request: GroupRequest, rid: str) -> Sampled:
        weights = engine.weights
        assert weights is not None, "the router gives out serving engines only"
        params = self._params[request.ticket.kind]
        self._check(engine, request, params.max_new_tokens)
        body = GenerateRequest(
            input_ids=request.prompt.token_ids,
            sampling_params=params,
            rid=rid,
            return_logprob=True,
            extra_key=str(weights),
        )
        started_s = self._clock()
        try:
            reply = await engine.client.generate(body, timeout_s=self._section.request_timeout_s)
        except asyncio.CancelledError:
            self._later(self._abort(engine, rid))
            raise
        try:
            completion = completion_from_reply(
                reply,
                prompt_token_ids=request.prompt_token_ids,
                prompt_weights=weights,
                temperature=params.temperature,
            )
        except UnknownWeights as error:
            engine.condemn(f"it lost its weights: {error}")
            raise
        return Sampled(completion, engine.engine_id, started_s, self._clock())

    def _check(self, engine: Engine, request: GroupRequest, max_new_tokens: int) -> None:
        """Refuse what would hurt the engine: an id beyond the vocabulary kills a real server."""
        info = engine.info
        if info.vocab_size is not None and request.largest_id >= info.vocab_size:
            raise GenerationError(
                f"prompt {request.prompt.index} holds id {request.largest_id}, beyond the "
                f"engine's {info.vocab_size}",
                retryable=False,
            )
        needed = len(request.prompt.token_ids) + max_new_tokens
        if info.context_length is not None and needed > info.context_length:
            raise GenerationError(
                f"prompt {request.prompt.index} of {len(request.prompt.token_ids)} tokens and "
                f"{max_new_tokens} new ones (max_new_tokens) exceed the engine's context of "
                f"{info.context_length}",
                retryable=False,
            )

    async def _abort(self, engine: Engine, rid: str) -> None:
        try:
            await engine.client.abort(rid)
        except GenerationError as error:
            logger.debug("could not abort %s: %s", rid, error)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Wait for aborts under way; each has the client's deadline."""
        if self._aborts:
            await asyncio.wait(self._aborts)


def _sampling_params(
    max_new_tokens: int, temperature: float, stop_token_ids: list[int]
) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        n=1,
        stop_token_ids=stop_token_ids or None,
    )
