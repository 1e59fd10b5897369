"""From a ticket to its end: sample a group, score it, insert it or say why not.

    start(ticket) -> members sampled (Sampler) -> scored (RewardPool) -> insert
                          |                          |
                          |                          +-> end: no_signal | reward_failed
                          |                          +-> evaluated (eval tickets)
                          +-> end: generation_failed | invalid

Every claimed ticket ends in one insert, evaluated or end call, unless the claim is lost: past
`generation.group_timeout_s`, when the server says that the attempt is over, and at a stop, where
the goodbye gives all claims back.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from async_grpo.config.algorithm import ZeroVariance
from async_grpo.config.schema import Config
from async_grpo.errors import ConfigError, GenerationError
from async_grpo.generation.routing import Place, Placement, Router
from async_grpo.generation.sample_log import SampleLog, ScoredGroup
from async_grpo.generation.sampler import GroupRequest, Sampled, Sampler
from async_grpo.generation.witness import WitnessLog
from async_grpo.interfaces import Clock, GeneratorReplay, RewardPool, Tokenizer
from async_grpo.replay_parts import EndStats
from async_grpo.tasks.prompts import PromptSource
from async_grpo.types import (
    DropReason,
    InsertOutcome,
    Prompt,
    RewardOutcome,
    Rollout,
    RolloutGroup,
    Ticket,
    TicketKind,
    WeightsName,
)

logger = logging.getLogger(__name__)


class _Ended(Exception):  # noqa: N818 -- an outcome, not an error
    """The attempt ends without an insert."""

    def __init__(self, reason: DropReason, detail: str, stats: EndStats | None = None) -> None:
        self.reason, self.detail, self.stats = reason, detail, stats
        super().__init__(detail)


@dataclass(eq=False)
class _Job:
    """One group under way."""

    ticket: Ticket
    claimed_s: float
    placement: Placement
    places: list[Place]
    """one per member, for its first try"""
    production: asyncio.Task[RolloutGroup] | None = None
    cancelled: bool = False
    num_tokens: int = 0
    """sampled so far"""
    scored: ScoredGroup | None = None
    """for the sample log"""


@dataclass
class Counters:
    """What became of the groups of this generator."""

    inserted: dict[InsertOutcome, int] = field(default_factory=dict)
    ended: dict[DropReason, int] = field(default_factory=dict)
    num_evaluated: int = 0
    num_claims_lost: int = 0
    num_tokens: int = 0
    """sampled, whatever became of them"""
    last_error: str = ""

    @property
    def num_groups(self) -> int:
        """Groups that came to an end here."""
        return sum(self.inserted.values()) + sum(self.ended.values()) + self.num_evaluated


class GroupRunner:
    """Runs groups side by side. One event loop owns it.

    Args:
        config: sections generation and algorithm.
        name: of the generator.
        replay: where groups go.
        router: where there is room.
        sampler: samples members.
        prompts: prompt of an index.
        tokenizer: text of a completion, for the reward.
        rewards: scores it.
        witness: record of every group.
        on_change: called when the number of inserts or of groups changes.
        samples: where a few completions are kept for people; None: nowhere.
        clock: times groups.

    Attributes:
        num_inserting: groups between the start of their insert and its answer.
        counters: outcomes so far.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        replay: GeneratorReplay,
        router: Router,
        sampler: Sampler,
        prompts: PromptSource,
        tokenizer: Tokenizer,
        rewards: RewardPool,
        witness: WitnessLog,
        on_change: Callable[[], None],
        samples: SampleLog | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._section = config.generation
        self._num_completions = {
            TicketKind.TRAIN: config.generation.group_size,
            TicketKind.EVAL: config.eval.num_completions,
        }
        self._drop_zero_variance = config.algorithm.zero_variance is ZeroVariance.drop
        self._name = name
        self._replay = replay
        self._router = router
        self._sampler = sampler
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._witness = witness
        self._on_change = on_change
        self._samples = samples
        self._clock = clock
        self._jobs: dict[tuple[int, int], _Job] = {}
        self.num_inserting = 0
        self.counters = Counters()

    @property
    def claims(self) -> list[tuple[int, int]]:
        """(group_id, attempt) of every group under way."""
        return list(self._jobs)

    @property
    def num_groups(self) -> int:
        """Groups under way."""
        return len(self._jobs)

    def cancel(self, keys: Iterable[tuple[int, int]]) -> None:
        """These attempts are over at the server: abort what is still being sampled of them."""
        for key in keys:
            job = self._jobs.get(key)
            if job is not None and job.production is not None and not job.production.done():
                job.cancelled = True
                job.production.cancel()

    def start(self, ticket: Ticket) -> Coroutine[Any, Any, None]:
        """Queue the group's requests; the coroutine brings the ticket to its end.

        The requests are in the queue when this returns, so that the next ticket is claimed only
        when there is room behind them. The coroutine raises PeerError when the replay server is
        gone and RewardError when no reward can be computed at all.
        """
        placement = Placement()
        places = [
            self._router.enqueue(placement) for _ in range(self._num_completions[ticket.kind])
        ]
        job = _Job(ticket, self._clock(), placement, places)
        self._jobs[ticket.group_id, ticket.attempt] = job
        return self._run(job)

    async def _run(self, job: _Job) -> None:
        try:
            await self._to_its_end(job)
        finally:
            for place in job.places:
                place.leave()
            del self._jobs[job.ticket.group_id, job.ticket.attempt]
            self._on_change()

    async def _to_its_end(self, job: _Job) -> None:
        job.production = asyncio.create_task(self._produce(job))
        try:
            group = await self._within_deadline(job.production)
        except TimeoutError:
            self._claim_lost(job, f"not ready within {self._section.group_timeout_s:g} s")
            return
        except asyncio.CancelledError:
            if not job.cancelled:
                raise
            self._claim_lost(job, "the replay server has ended the attempt")
            return
        except _Ended as end:
            await self._end(job, end)
            self._keep_samples(job, end.reason.value)
            return
        if job.ticket.kind is TicketKind.EVAL:
            await self._report_evaluation(job.ticket, group)
            self._keep_samples(job, "evaluated")
        else:
            self._keep_samples(job, (await self._insert(group)).value)

    def _keep_samples(self, job: _Job, outcome: str) -> None:
        if self._samples is not None and job.scored is not None:
            self._samples.finished(job.scored, outcome)

    def _claim_lost(self, job: _Job, why: str) -> None:
        """The server has taken the claim back, or will at its own deadline: nothing to report."""
        self.counters.num_claims_lost += 1
        ticket = job.ticket
        logger.warning("group %d attempt %d is given up: %s", ticket.group_id, ticket.attempt, why)

    async def _within_deadline(self, production: asyncio.Task[RolloutGroup]) -> RolloutGroup:
        async with asyncio.timeout(self._section.group_timeout_s):
            return await production

    async def _produce(self, job: _Job) -> RolloutGroup:
        ticket = job.ticket
        try:
            prompt = self._prompts.prompt(ticket.prompt_index, ticket.kind)
        except (ConfigError, IndexError) as error:
            raise _Ended(DropReason.INVALID, f"no prompt {ticket.prompt_index}: {error}") from error
        members = await self._sample(job, GroupRequest(ticket, prompt))
        rollouts = await self._score(job, prompt, members)
        now = self._clock()
        # tokens of one completion are taken to be spread evenly over its request
        token_ages = sum(
            member.completion.num_tokens * (now - (member.started_s + member.ended_s) / 2)
            for member in members
        )
        return RolloutGroup(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            prompt_index=ticket.prompt_index,
            rollouts=rollouts,
            kind=ticket.kind,
            generator=self._name,
            engine_id=members[0].engine_id,
            started_s=now - job.claimed_s,
            sampled_ago_s=token_ages / job.num_tokens,
        )

    async def _sample(self, job: _Job, request: GroupRequest) -> list[Sampled]:
        async def sample(member: int) -> Sampled:
            sampled = await self._sampler.sample(request, member, job.places[member], job.placement)
            job.num_tokens += sampled.completion.num_tokens
            self.counters.num_tokens += sampled.completion.num_tokens
            return sampled

        try:
            async with asyncio.TaskGroup() as tasks:
                members = [tasks.create_task(sample(member)) for member in range(len(job.places))]
        except* GenerationError as errors:
            (first, *_) = errors.exceptions
            raise _Ended(DropReason.GENERATION_FAILED, str(first)) from first
        return [member.result() for member in members]

    async def _score(self, job: _Job, prompt: Prompt, members: list[Sampled]) -> list[Rollout]:
        texts = [
            self._tokenizer.decode(member.completion.token_ids.tolist(), skip_special_tokens=True)
            for member in members
        ]
        scores = await self._rewards.score(texts, prompt)
        job.scored = ScoredGroup(job.ticket, prompt, members, texts, scores)
        failed = [outcome for outcome, reward, _ in scores if not _usable(outcome, reward)]
        if failed:
            found = ", ".join(sorted({outcome.value for outcome in failed}))
            raise _Ended(
                DropReason.REWARD_FAILED,
                f"{len(failed)} of {len(scores)} completions: {found} ({self._rewards.last_error})",
            )
        rewards = [reward for _, reward, _ in scores]
        if (
            self._drop_zero_variance
            and job.ticket.kind is TicketKind.TRAIN
            and min(rewards) == max(rewards)
        ):
            stats = EndStats(
                num_completions=len(rewards), num_tokens=job.num_tokens, reward_sum=sum(rewards)
            )
            raise _Ended(DropReason.NO_SIGNAL, f"all rewards are {rewards[0]:g}", stats)
        return [
            Rollout(sequences=[member.completion], reward=reward, reward_parts=parts)
            for member, (_, reward, parts) in zip(members, scores, strict=True)
        ]

    async def _report_evaluation(self, ticket: Ticket, group: RolloutGroup) -> None:
        """The figures of an eval group; its tokens stay here."""
        tokens: Counter[WeightsName] = Counter()
        for rollout in group.rollouts:
            for sequence in rollout.sequences:
                for segment in sequence.segments:
                    if segment.weights is not None:
                        tokens[segment.weights] += segment.num_tokens
        stats = EndStats(
            num_completions=len(group.rollouts),
            num_tokens=group.num_tokens,
            reward_sum=sum(rollout.reward for rollout in group.rollouts),
        )
        self._witness.evaluated(group)
        await self._replay.evaluated(ticket, stats, sorted(tokens.items()))
        self.counters.num_evaluated += 1

    async def _insert(self, group: RolloutGroup) -> InsertOutcome:
        self.num_inserting += 1
        self._on_change()
        try:
            self._witness.sent(group)
            outcome = await self._replay.insert(group)
            self._witness.answered(group, outcome)
        finally:
            self.num_inserting -= 1
        self.counters.inserted[outcome] = self.counters.inserted.get(outcome, 0) + 1
        if outcome not in (InsertOutcome.STORED, InsertOutcome.DUPLICATE):
            logger.info("group %d attempt %d: %s", group.group_id, group.attempt, outcome.value)
        return outcome

    async def _end(self, job: _Job, end: _Ended) -> None:
        ticket = job.ticket
        log = logger.debug if end.reason is DropReason.NO_SIGNAL else logger.warning
        log(
            "group %d attempt %d ends as %s: %s",
            ticket.group_id,
            ticket.attempt,
            end.reason.value,
            end.detail,
        )
        if end.reason is not DropReason.NO_SIGNAL:
            self.counters.last_error = f"group {ticket.group_id}: {end.detail}"
        # without rewards the completions must not enter the mean reward: tokens only
        stats = end.stats or EndStats(num_tokens=job.num_tokens)
        self._witness.ended(ticket, end.reason, job.num_tokens)
        await self._replay.end(ticket, end.reason, end.detail, stats)
        self.counters.ended[end.reason] = self.counters.ended.get(end.reason, 0) + 1


def _usable(outcome: RewardOutcome, reward: float) -> bool:
    """Whether a completion has a reward; an unparseable one only where the task gives it one."""
    if outcome is RewardOutcome.UNPARSEABLE:
        return not math.isnan(reward)
    return outcome is RewardOutcome.SCORED
