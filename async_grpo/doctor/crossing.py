"""Completions in flight while the weights change: is every token tagged with what sampled it?

The log-probs tell: each token has two, one under either policy, and the engine's must be the one
of the weights that its segment names. Under `retract` that holds for every token; under `in_place`
only for those before the switch, since no single policy reproduces the others.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from async_grpo.doctor.gaps import gap_between
from async_grpo.doctor.report import Finding, fail, ok, skipped
from async_grpo.doctor.subject import Sample, Subject
from async_grpo.doctor.two_policies import Which
from async_grpo.engine_api import PauseMode
from async_grpo.errors import GenerationError
from async_grpo.generation.update_modes import kv_tokens
from async_grpo.types import WeightsName

_NUM_COMPLETIONS = 4
_MAX_NEW_TOKENS = 128
_PROMPT_TOKENS = 4
_MIN_SAMPLED = 2
"""Tokens of each completion, on average, before the update begins."""
_LONGEST_WAIT_S = 5.0
"""For those; an engine need not tell how many there are."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Crossing:
    """What became of the completions that an update found in flight."""

    mode: PauseMode
    boundaries: list[tuple[int, int]]
    """(first token under the new weights, number of tokens) of each that crossed"""
    max_gap: float
    problem: str

    @property
    def undecided(self) -> bool:
        """None crossed, and nothing is wrong: try again."""
        return not self.boundaries and not self.problem

    def __str__(self) -> str:
        if self.undecided:
            return f"{self.mode}: none was in flight at the right moment"
        told = ", ".join(f"{start}/{total}" for start, total in self.boundaries)
        return f"{self.mode}: {len(self.boundaries)} crossed at {told}, within {self.max_gap:.2g}"


def spans_finding(crossings: Sequence[Crossing]) -> Finding:
    """The verdict over updates in both modes."""
    check = "spans"
    values = {f"{each.mode}_num_crossed": float(len(each.boundaries)) for each in crossings}
    values |= {f"{each.mode}_gap_max": each.max_gap for each in crossings}
    for crossing in crossings:
        if crossing.problem:
            advice = (
                "the staleness of every completion in flight at an update would be wrong: use an "
                "engine whose /generate returns right weight_versions (SGLang 0.5.23 does)"
            )
            return fail(check, f"{crossing.mode}: {crossing.problem}", advice, values)
    figure = "; ".join(str(each) for each in crossings)
    if crossings[0].undecided:
        return skipped(check, figure)
    return ok(check, f"{figure} nats of the weights that are named", values)


async def cross(
    subject: Subject,
    mode: PauseMode,
    update: Callable[[], Awaitable[T]],
    policies: Mapping[str, Which],
) -> tuple[Crossing, T]:
    """Have completions in flight during `update`, and judge them.

    Args:
        subject: the engine.
        mode: of the update.
        update: sends other weights.
        policies: weights name -> which of the two, of every update until then; `update` adds its
            own.
    """
    prompt = (subject.prompts[0] * _PROMPT_TOKENS)[:_PROMPT_TOKENS]
    num_tokens = min(_MAX_NEW_TOKENS, subject.context - len(prompt) - 1)
    tasks = [
        asyncio.create_task(
            subject.sample(prompt, num_tokens, namespace=subject.namespace, ignore_eos=True)
        )
        for _ in range(_NUM_COMPLETIONS)
    ]
    try:
        await _until_sampling(subject, tasks, len(prompt))
        result = await update()
        samples = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    judge = _judge_in_place if mode is PauseMode.IN_PLACE else _judge_retract
    return await judge(subject, samples, policies), result


async def _until_sampling(
    subject: Subject, tasks: list["asyncio.Task[Sample]"], prompt_tokens: int
) -> None:
    """Until they hold more KV than their prompts, or one has ended.

    Ended by the engine; at the latest after `_LONGEST_WAIT_S`.
    """
    wanted = len(tasks) * (prompt_tokens + _MIN_SAMPLED)
    with_deadline = asyncio.get_running_loop().time() + _LONGEST_WAIT_S
    while not any(task.done() for task in tasks):
        if kv_tokens(await subject.client.load()) >= wanted:
            return
        if asyncio.get_running_loop().time() > with_deadline:
            return


async def _judge_retract(
    subject: Subject, samples: list[Sample], policies: Mapping[str, Which]
) -> Crossing:
    """Every token is of the weights that it is tagged with."""
    limits = subject.limits
    boundaries, worst, problem = [], 0.0, ""
    for sample in samples:
        under = {
            which: await subject.expected(sample, which) for which in (Which.OWN, Which.PERTURBED)
        }
        named = [
            _policy_of(segment.weights, policies)
            for segment in sample.part.segments
            for _ in range(segment.num_tokens)
        ]
        expected = [under[which][position] for position, which in enumerate(named)]
        gap = gap_between(sample.part.logprobs, expected)
        worst = max(worst, gap.max)
        if not limits.hold(gap):
            problem = _contradiction(sample, under, policies)
            break
        if len(sample.part.segments) > 1:
            boundaries.append((sample.part.segments[0].num_tokens, len(named)))
    return Crossing(PauseMode.RETRACT, boundaries, worst, problem)


async def _judge_in_place(
    subject: Subject, samples: list[Sample], policies: Mapping[str, Which]
) -> Crossing:
    """The switch is where it is said to be: exact before it, not behind it."""
    limits = subject.limits
    boundaries, worst, late, problem = [], 0.0, [], ""
    for sample in samples:
        first, *others = sample.part.segments
        if first.kv_mixed or not others:
            continue
        start, found = first.num_tokens, sample.part.logprobs
        expected = await subject.expected(sample, _policy_of(first.weights, policies))
        gap = gap_between(found[:start], expected[:start])
        worst = max(worst, gap.max)
        if not limits.hold(gap):
            problem = f"tokens tagged {first.weights} are not of these weights: {gap}"
        late.append(abs(found[start] - expected[start]) <= limits.p99)
        boundaries.append((start, len(found)))
    if len(late) > 1 and all(late):  # one may agree by chance
        problem = problem or "the token behind every switch is of the weights before it"
    return Crossing(PauseMode.IN_PLACE, boundaries, worst, problem)


def _policy_of(weights: WeightsName | None, policies: Mapping[str, Which]) -> Which:
    if str(weights) not in policies:
        raise GenerationError(f"tokens are tagged {weights}, which was never sent", retryable=False)
    return policies[str(weights)]


def _contradiction(
    sample: Sample, under: Mapping[Which, list[float]], policies: Mapping[str, Which]
) -> str:
    """What the spans say, and where the log-probs switch."""
    told = ", ".join(f"{each.num_tokens} under {each.weights}" for each in sample.part.segments)
    after = _policy_of(sample.part.segments[-1].weights, policies)
    before = Which.OWN if after is Which.PERTURBED else Which.PERTURBED
    found = np.array(sample.part.logprobs)
    off_before = np.abs(found - under[before])
    off_after = np.abs(found - under[after])
    # cost of a switch before token k, for k = 0 .. n
    costs = np.concatenate([[0.0], off_before.cumsum()]) + np.concatenate(
        [off_after[::-1].cumsum()[::-1], [0.0]]
    )
    switch = int(costs.argmin())
    return (
        f"the engine says {told} tokens; their log-probs switch at token {switch} of {len(found)}"
    )
