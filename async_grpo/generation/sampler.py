"""One member of a group: sent to an engine, and to another one if that fails.

Returns only completions that may be trained as far as the engine is concerned: whole, checked, and
sampled under weights that were confirmed. What a request had sampled when an update or its deadline
ended it is kept, and the next request goes on from there. Knows nothing of tickets, rewards or the
replay server.
"""

import asyncio
import itertools
import logging
import time
import zlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from async_grpo.config.eval import EvalSection
from async_grpo.config.generation import GenerationSection
from async_grpo.engine_api import GenerateReply, GenerateRequest, SamplingParams
from async_grpo.errors import GenerationError
from async_grpo.generation.completions import (
    Part,
    join_parts,
    part_from_reply,
)
from async_grpo.generation.engines import Engine
from async_grpo.generation.names import UnknownWeights
from async_grpo.generation.routing import Place, Placement, Router
from async_grpo.interfaces import Clock
from async_grpo.types import Completion, FinishReason, Int32Array, Prompt, Ticket, TicketKind

logger = logging.getLogger(__name__)

MAX_TRIES = 6
"""Of one member; waiting for an engine is no try, nor is what an update or a deadline ended with
tokens."""
FIRST_BACKOFF_S = 0.05
ABORT_ANSWER_S = 20.0
"""For a request to come back with what it has sampled, once it was aborted at its deadline. Running
ones take one more decode step, and the abort itself waits for a busy server."""


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

    def __post_init__(self) -> None:
        self.prompt_token_ids = np.array(self.prompt.token_ids, dtype=np.int32)


class _Draft:
    """One completion under way: the parts that requests have sampled so far."""

    def __init__(self, request: GroupRequest, params: SamplingParams, started_s: float) -> None:
        self.request = request
        self.params = params
        self._started_s = started_s
        self._parts: list[Part] = []
        self._token_ids: list[int] = []

    def add(self, part: Part) -> None:
        """These tokens may be trained."""
        self._parts.append(part)
        self._token_ids += part.token_ids

    def finish_reason(self) -> FinishReason | None:
        """Why it is complete; None: it is not. An abort may come with the very last token."""
        if not self._token_ids:
            return None
        if (reason := self._parts[-1].finish_reason) is not None:
            return reason
        if self._token_ids[-1] in (self.params.stop_token_ids or ()):
            return FinishReason.STOP
        if len(self._token_ids) >= self.params.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def rest(self, rid: str, namespace: str, *, seed: int | None) -> GenerateRequest:
        """The request for what is still to be sampled."""
        params = msgspec.structs.replace(
            self.params,
            max_new_tokens=self.params.max_new_tokens - len(self._token_ids),
            sampling_seed=seed,
        )
        return GenerateRequest(
            input_ids=[*self.request.prompt.token_ids, *self._token_ids],
            sampling_params=params,
            rid=rid,
            return_logprob=True,
            extra_key=namespace,
        )

    def finished(self, reason: FinishReason, engine_id: str, now_s: float) -> Sampled:
        """All of it."""
        completion = join_parts(
            self._parts,
            prompt_token_ids=self.request.prompt_token_ids,
            finish_reason=reason,
            temperature=self.params.temperature,
        )
        return Sampled(completion, engine_id, self._started_s, now_s)


class Sampler:
    """Samples members of groups.

    Args:
        router: where there is room.
        section: sampling parameters and deadlines.
        evaluation: sampling parameters of eval tickets, where they differ.
        stop_token_ids: end a completion.
        seed: of the run.
        clock: for the times in `Sampled`.

    Attributes:
        abort_answer_s: for the reply to an abort at a deadline.
        num_retries: requests that failed and were sent again.
        num_continued: requests that an update or their deadline ended with what they had sampled,
            and that were continued by another.
    """

    def __init__(
        self,
        router: Router,
        section: GenerationSection,
        *,
        stop_token_ids: list[int],
        evaluation: EvalSection | None = None,
        seed: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._router = router
        self._section = section
        self._seed = seed
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
        self.abort_answer_s = ABORT_ANSWER_S
        self.num_retries = 0
        self.num_continued = 0

    async def sample(
        self, request: GroupRequest, member: int, place: Place, placement: Placement
    ) -> Sampled:
        """One completion of the prompt. The group's deadline is the caller's.

        Cancelling it aborts the request at the engine.

        Raises:
            GenerationError: the engine refuses the request, or too many tries failed.
        """
        draft = _Draft(request, self._params[request.ticket.kind], self._clock())
        backoff_s = FIRST_BACKOFF_S
        num_failures = 0
        for number in itertools.count():
            # SGLang aborts every request whose id begins with the one it is told: no member's does
            rid = f"{request.ticket.group_id}-{request.ticket.attempt}-{member:03d}"
            if number:
                rid += f"-{number}"
            try:
                async with place as engine:
                    part = await self._sample_on(engine, draft, rid)
                updating = engine.updating
                if await engine.cleared():
                    draft.add(part)
                    if (reason := draft.finish_reason()) is not None:
                        return draft.finished(reason, engine.engine_id, self._clock())
                    if part.token_ids or updating:  # ended early: go on behind it
                        self.num_continued += 1
                        place = self._router.enqueue(placement, first=True)
                        continue
                    problem = f"engine {engine.engine_id} returned no token"
                else:
                    problem = f"engine {engine.engine_id} was lost, or failed its update's probe"
            except GenerationError as error:
                if not error.retryable:
                    raise
                problem = str(error)
            num_failures += 1
            if num_failures == MAX_TRIES:
                break
            self.num_retries += 1
            # the slot says once why an engine was lost; its many requests need not
            logger.debug("request %s is sampled again: %s", rid, problem)
            await asyncio.sleep(backoff_s)
            backoff_s *= 2
            place = self._router.enqueue(placement, first=True)
        raise GenerationError(
            f"member {member} failed {MAX_TRIES} times, last: {problem}", retryable=False
        )

    async def _sample_on(self, engine: Engine, draft: "_Draft", rid: str) -> Part:
        weights = engine.weights
        assert weights is not None, "the router gives out serving engines only"
        self._check(engine, draft)
        seeded = engine.info.enable_deterministic_inference
        seed = _seed(self._seed, rid) if seeded else None
        request = draft.rest(rid, engine.names.served(weights), seed=seed)
        try:
            reply = await self._reply(engine, request, rid)
        except (asyncio.CancelledError, GenerationError):
            # it may go on there: nobody waits for it
            self._later(self._abort(engine, rid))
            raise
        num_read = reply.meta_info.prompt_tokens
        if reply.output_ids and num_read not in (0, len(request.input_ids)):
            raise GenerationError(
                f"engine {engine.engine_id} read {num_read} of the {len(request.input_ids)} tokens "
                f"of request {rid}: it must not truncate prompts",
                retryable=False,
            )
        try:
            return part_from_reply(
                reply,
                prompt_weights=weights,
                names=engine.names,
                num_late_tokens=engine.num_late_tokens,
            )
        except UnknownWeights as error:
            engine.condemn(f"it lost its weights: {error}", taken_by=error.holder)
            raise

    async def _reply(self, engine: Engine, request: GenerateRequest, rid: str) -> GenerateReply:
        """The reply; past `request_timeout_s` that of an aborted request: what it has sampled.

        A connection that is closed instead would lose those tokens, and a completion that outlasts
        the deadline could never end: only short ones would be trained.

        Raises:
            GenerationError: the engine refuses, fails, or does not answer the abort either.
        """
        deadline_s = self._section.request_timeout_s
        call = asyncio.create_task(
            engine.client.generate(request, timeout_s=self._section.group_timeout_s)
        )
        try:
            if await _done(call, deadline_s):
                return call.result()
            while True:
                # A paused engine answers when it goes on; the update has deadlines of its own. What
                # it holds at its door it does not know yet, so it is told again.
                updating = engine.updating
                await self._abort(engine, rid)
                if await _done(call, self.abort_answer_s):
                    return call.result()
                if not updating:
                    break
        finally:
            call.cancel()
        raise GenerationError(
            f"engine {engine.engine_id} did not answer request {rid} within {deadline_s:g} s "
            "(generation.request_timeout_s), nor its abort",
            retryable=True,
        )

    def _check(self, engine: Engine, draft: "_Draft") -> None:
        """Refuse what the engine could not hold."""
        prompt, budget = draft.request.prompt, draft.params.max_new_tokens
        limit = engine.info.context_length
        if limit is not None and len(prompt.token_ids) + budget > limit:
            raise GenerationError(
                f"prompt {prompt.index} of {len(prompt.token_ids)} tokens and {budget} new ones "
                f"(max_new_tokens) exceed the engine's context of {limit}",
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


async def _done(call: "asyncio.Task[GenerateReply]", timeout_s: float) -> bool:
    return bool((await asyncio.wait([call], timeout=timeout_s))[0])


def _seed(run_seed: int, rid: str) -> int:
    """Every request its own, so that the members of a group, its attempts and runs differ."""
    return zlib.crc32(f"{run_seed}/{rid}".encode())


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
