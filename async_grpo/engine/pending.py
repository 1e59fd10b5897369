"""One unfinished request of the embedded engine. Event-loop thread only."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from async_grpo.engine.admission import RequestRefused
from async_grpo.engine.batching import Sampled
from async_grpo.engine.replies import make_reply
from async_grpo.engine_api import GenerateReply, GenerateRequest

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Pending:
    """A request and the future that its `generate` waits on."""

    key: str
    """fresh for each request; client ids may come back"""
    request: GenerateRequest
    eos_token_ids: frozenset[int]
    done: asyncio.Future[GenerateReply]
    received_s: float = field(default_factory=time.monotonic)
    prompt_logprobs: list[float] | None = None
    """of ids 1..; None until they are computed, or if they were not asked for"""

    @property
    def rid(self) -> str:
        """The client's id, or ours."""
        return self.request.rid or self.key

    def answer(self, sampled: Sampled, finish_reason: dict[str, Any] | None = None) -> None:
        """Resolve with what was sampled, unless it is resolved already."""
        if self.done.done():
            return None
        if sampled.error is not None:
            return self.fail(RequestRefused(sampled.error, status=500))
        try:
            reply = make_reply(
                self.request,
                sampled,
                rid=self.rid,
                eos_token_ids=self.eos_token_ids,
                prompt_logprobs=self.prompt_logprobs,
                latency_s=time.monotonic() - self.received_s,
                finish_reason=finish_reason,
            )
        except ValueError as error:  # ids and log-probs differ in number
            logger.exception("no reply to request %s", self.key)
            return self.fail(RequestRefused(str(error), status=500))
        return self.done.set_result(reply)

    def fail(self, refusal: RequestRefused) -> None:
        """Resolve with a refusal, unless it is resolved already."""
        if not self.done.done():
            self.done.set_exception(refusal)
