"""transformers' continuous batching, made exact about weight versions.

The manager decodes in a thread of its own, one forward pass per step, and can be paused between
steps. Everything here that reads or changes the scheduler's requests runs on the model thread under
such a pause; outputs come back through `_StampingRouter`, on the batching thread, with the version
of the weights that sampled their last token.

Relies on internals of transformers (request states, scheduler queues, the output router); the
engine's contract suite is what notices when they change.
"""

import asyncio
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState

from async_grpo.config.engine import EngineSection
from async_grpo.engine.model import LoadedModel
from async_grpo.weights.model_facts import paged_tokens

logger = logging.getLogger(__name__)

_DEFAULT_TEMPERATURE = 0.5
"""Temperature of requests that name none. Ours always name one; transformers only builds the
processor that reads a request's own temperature if this default is not 1."""


@dataclass(frozen=True)
class Sampled:
    """What a request has sampled, at its end or at an abort."""

    token_ids: list[int]
    logprobs: list[float]
    version: str
    """of the weights that sampled the last token, or that would have sampled the first"""
    switches: list[tuple[int, str]]
    """(number of tokens, version that sampled up to there) at each change of weights"""
    num_retractions: int = 0
    """how often its KV was freed by `Batching.retract`"""
    error: str | None = None


@dataclass(frozen=True)
class Occupancy:
    """What the batching thread holds at an instant."""

    num_running: int
    num_kv_tokens: int
    """KV entries of running requests"""
    num_sampled_tokens: int
    """by requests that are unfinished"""


class _StampingRouter(OutputRouter):
    """Hands outputs to the event loop, one wake-up per step, with the current version."""

    def __init__(
        self, deliver: Callable[[list[GenerationOutput], str], None], version: str
    ) -> None:
        super().__init__()
        self.version = version
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs, self.version)


class Batching:
    """The batching thread of one model.

    Args:
        on_finished: called on the event loop for each request that ended.
        on_death: called on the event loop once if decoding ends unasked, with the reason.

    Attributes:
        num_cache_tokens: size of the KV cache.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineSection,
        *,
        version: str,
        on_finished: Callable[[str, Sampled], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._manager = model.module.init_continuous_batching(
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]  # transformers
                do_sample=True,
                temperature=_DEFAULT_TEMPERATURE,
                top_k=0,
                top_p=1.0,
                eos_token_id=-1,
                pad_token_id=0,
            ),
            continuous_batching_config=_batching_config(model, config),
        )
        self.num_cache_tokens = _num_blocks(model, config)[0] * config.page_size
        self._router = _StampingRouter(self._finish, version)
        self._manager.output_router = self._router
        self._switches: dict[str, list[tuple[int, str]]] = {}
        self._retractions: Counter[str] = Counter()
        self._on_finished = on_finished
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._stopping = False

    @property
    def version(self) -> str:
        """Of the weights that the next token is sampled under."""
        return self._router.version

    def start(self) -> None:
        """Begin to decode."""
        with torch.inference_mode():  # the thread inherits it
            self._manager.start()
        threading.Thread(target=self._watch, name="batching watch", daemon=True).start()

    def stop(self, *, timeout_s: float, paused: bool) -> None:
        """End decoding; unfinished requests get no answer.

        Args:
            timeout_s: to wait for the step in progress.
            paused: the model thread holds a pause and will not come back to release it.
        """
        self._stopping = True
        if paused:
            self._manager.background_thread_status.release_pause()
        self._manager.stop(block=True, timeout=timeout_s, hard_stop=True)

    def submit(
        self,
        key: str,
        input_ids: list[int],
        *,
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float,
    ) -> bool:
        """Queue a request under a fresh `key`; False if decoding has ended. Any thread."""
        accepted = self._manager.add_request(
            input_ids,
            request_id=key,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_token_ids),
            temperature=float(temperature),
        )
        return accepted is not None

    def pause(self) -> AbstractContextManager[None]:
        """No step runs inside. Model thread only; nests.

        Raises:
            RuntimeError: decoding has ended.
        """
        context: AbstractContextManager[None] = self._manager.pause()
        return context

    def occupancy(self) -> Occupancy:
        """Any thread, at any time: reads without a lock, so the parts may be a step apart."""
        processor = self._manager.batch_processor
        if processor is None:  # the thread is starting
            return Occupancy(0, 0, 0)
        running = list(processor.scheduler.active_requests.values())
        waiting = list(processor.scheduler.waiting_requests.values())
        return Occupancy(
            num_running=len(running),
            num_kv_tokens=sum(state.current_len() for state in running),
            num_sampled_tokens=sum(len(state.logprobs) for state in [*running, *waiting]),
        )

    # ---- model thread, under a pause

    def cancel(self, keys: Sequence[str]) -> dict[str, Sampled]:
        """End requests; what they have sampled. Those not begun, or ended already, are absent."""
        partial = {}
        for key in keys:
            if (state := self._find(key)) is not None:
                output = state.to_generation_output()  # type: ignore[no-untyped-call]  # ditto
                partial[key] = self._sampled(output, self.version)
            self._manager.cancel_request(key)
        self._admit_again()
        return partial

    def retract(self) -> int:
        """Free the KV of running requests, and queue them before all others; how many there were.

        When decoding goes on they are read again, what they have sampled included, and continue
        with the log-probs of the weights of that time.
        """
        running = list(self._manager.batch_processor.scheduler.active_requests.values())
        for state in reversed(running):
            self._restart(state)
            self._retractions[state.request_id] += 1
        self._admit_again()
        return len(running)

    def switch_version(self, version: str) -> None:
        """The weights were replaced: tokens from here on are sampled under `version`."""
        for state in self._states():
            if num_tokens := len(state.logprobs):  # survives a reset for lack of cache
                self._switches.setdefault(state.request_id, []).append((num_tokens, self.version))
            elif state.position_offset:
                self._restart(state)
        self._router.version = version

    # ---- inside

    def _states(self) -> list[RequestState]:
        scheduler = self._manager.batch_processor.scheduler
        return [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]

    def _find(self, key: str) -> RequestState | None:
        scheduler = self._manager.batch_processor.scheduler
        state: RequestState | None = scheduler.active_requests.get(
            key
        ) or scheduler.waiting_requests.get(key)
        return state

    def _restart(self, state: RequestState) -> None:
        """Free its KV and make it the first of those that wait.

        A half-read prompt, too, must be read afresh after an update, or its first token would come
        from mixed weights.
        """
        scheduler = self._manager.batch_processor.scheduler
        scheduler.finish_request(state.request_id)
        again = state.create_equivalent_initial_request()
        scheduler.waiting_requests[again.request_id] = again
        scheduler.waiting_requests_order.appendleft(again.request_id)

    def _admit_again(self) -> None:
        """After a full cache only the end of a request lets waiting ones in; this is one, too."""
        self._manager.batch_processor.scheduler.block_new_requests = False

    def _finish(self, outputs: list[GenerationOutput], version: str) -> None:
        for output in outputs:
            self._on_finished(output.request_id, self._sampled(output, version))

    def _sampled(self, output: GenerationOutput, version: str) -> Sampled:
        return Sampled(
            token_ids=output.generated_tokens,
            logprobs=output.logprobs,
            version=version,
            switches=self._switches.pop(output.request_id, []),
            num_retractions=self._retractions.pop(output.request_id, 0),
            error=output.error,
        )

    def _watch(self) -> None:
        """Report the end of the batching thread, which logs and swallows its own exceptions."""
        self._manager._generation_thread.join()
        if not self._stopping and not self._loop.is_closed():
            error = self._manager.background_thread_status.fatal_error
            reason = f"the batching loop died: {error!r}"
            self._loop.call_soon_threadsafe(self._on_death, reason)


def _batching_config(model: LoadedModel, config: EngineSection) -> ContinuousBatchingConfig:
    """Explicit sizes: left to itself, transformers takes most of the free memory."""
    seed = config.sampling_seed
    num_blocks, fits_all = _num_blocks(model, config)
    return ContinuousBatchingConfig(
        return_logprobs=True,
        per_request_processors=True,
        page_size=config.page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max(config.max_batch_tokens, config.max_running_requests),
        max_requests_per_batch=config.max_running_requests,
        allow_block_sharing=False,  # no prefix cache that an update could leave stale
        use_async_batching=False,  # a step in flight at a pause would blur the token's version
        # The reserve keeps running requests from being reset; not needed where all fit.
        safety_margin=0.0 if fits_all else None,
        auto_switch_to_flash=model.device.type == "cuda" and model.module.dtype != torch.float32,
        seed=secrets.randbits(32) if seed is None else seed,
    )


def _num_blocks(model: LoadedModel, config: EngineSection) -> tuple[int, bool]:
    """Blocks of the KV cache, and whether all slots fit at full length."""
    text = model.module.config.get_text_config().to_dict()
    blocks_per_sequence = -(-model.limits.context_length // config.page_size)
    wanted = config.max_running_requests * blocks_per_sequence
    affordable = paged_tokens(text, config, model.module.dtype.itemsize) // config.page_size
    if affordable < wanted:
        logger.info("the KV cache holds %d of %d blocks for full slots", affordable, wanted)
    return min(wanted, affordable), affordable >= wanted
