"""The engine under examination, and the ways to ask it. Knows no check."""

import asyncio
import itertools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from async_grpo.config.schema import Config
from async_grpo.doctor.gaps import LIMITS, Limits
from async_grpo.doctor.two_policies import TwoPolicies, Which
from async_grpo.engine_api import GenerateReply, GenerateRequest, SamplingParams, ServerInfo
from async_grpo.errors import GenerationError
from async_grpo.generation.completions import Part, part_from_reply
from async_grpo.generation.engines import Engine
from async_grpo.interfaces import EngineClient
from async_grpo.types import WeightsName


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion."""

    prompt: list[int]
    part: Part
    temperature: float
    reply: GenerateReply


@dataclass
class Subject:
    """One engine, the policy it should serve, and the prompts to try.

    Attributes:
        weights: name of the weights that the engine holds; None: nobody has sent any yet.
        which: of the two policies, the one whose weights these are.
    """

    config: Config
    url: str
    engine: Engine
    policies: TwoPolicies
    prompts: Sequence[list[int]]
    stop_token_ids: list[int]
    weights: WeightsName | None = None
    which: Which = Which.OWN
    _token: str = field(default_factory=lambda: secrets.token_hex(4))
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def client(self) -> EngineClient:
        """Of the engine."""
        return self.engine.client

    @property
    def info(self) -> ServerInfo:
        """What the engine says of itself."""
        return self.engine.info

    @property
    def limits(self) -> Limits:
        """The largest gap between it and the trainer that rounding explains."""
        return LIMITS[self.config.policy.dtype].above(self.policies.noise)

    @property
    def namespace(self) -> str:
        """Prefix-cache namespace of requests now: the weights, as in a run.

        The token keeps what an earlier examination has left in a cache apart.
        """
        return f"{self.weights}-{self._token}"

    @property
    def context(self) -> int:
        """Longest prompt and completion together."""
        own = getattr(self.policies.model.module.config, "max_position_embeddings", None)
        limits = [self.info.context_length, self.config.engine.context_length, own]
        return min((limit for limit in limits if limit), default=2048)

    async def sample(
        self,
        prompt: list[int],
        num_tokens: int,
        *,
        temperature: float = 1.0,
        namespace: str | None = None,
        ignore_eos: bool = False,
        **truncation: float,
    ) -> Sample:
        """One completion of at most `num_tokens`.

        Args:
            prompt: token ids.
            num_tokens: budget.
            temperature: of the sampling.
            namespace: of the prefix cache; None: no namespace.
            ignore_eos: sample the whole budget.
            **truncation: sampling parameters that a run never sends.

        Raises:
            GenerationError: the engine failed, or its reply is not right in itself.
        """
        assert self.weights is not None, "the engine was given weights"
        sent_under = self.weights
        params = SamplingParams(
            max_new_tokens=num_tokens,
            temperature=temperature,
            stop_token_ids=None if ignore_eos else self.stop_token_ids or None,
            ignore_eos=ignore_eos,
            **truncation,  # type: ignore[arg-type]  # top_k is an int
        )
        reply = await self._generate(
            GenerateRequest(
                input_ids=prompt,
                sampling_params=params,
                return_logprob=True,
                extra_key=namespace,
            )
        )
        part = part_from_reply(
            reply,
            prompt_weights=sent_under,
            names=self.engine.names,
            num_late_tokens=self.engine.num_late_tokens,
        )
        if not part.token_ids:
            raise GenerationError(f"{self.url} sampled nothing", retryable=False)
        return Sample(prompt, part, temperature, reply)

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """[len - 1] log-probs of ids 1.. at temperature 1, by a prefill without a cached prefix.

        Raises:
            GenerationError: the engine failed, or scored other ids.
        """
        reply = await self._generate(
            GenerateRequest(
                input_ids=token_ids,
                sampling_params=SamplingParams(max_new_tokens=1),
                return_logprob=True,
                logprob_start_len=0,
                extra_key=self.namespace,
            )
        )
        pairs = reply.meta_info.input_token_logprobs
        if [token_id for _, token_id, *_ in pairs] != token_ids:
            raise GenerationError(f"{self.url} scored other ids than it was sent", retryable=False)
        # a missing one becomes NaN, which no limit allows
        return [float("nan") if logprob is None else logprob for logprob, *_ in pairs[1:]]

    async def expected(self, sample: Sample, which: Which | None = None) -> list[float]:
        """The trainer's log-probs of a completion, at its temperature."""
        return await asyncio.to_thread(
            self.policies.logprobs,
            which or self.which,
            sample.prompt,
            sample.part.token_ids,
            sample.temperature,
        )

    async def _generate(self, request: GenerateRequest) -> GenerateReply:
        request.rid = f"doctor-{self._token}-{next(self._numbers)}"
        return await self.client.generate(
            request, timeout_s=self.config.generation.request_timeout_s
        )
