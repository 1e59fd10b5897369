"""Completions in flight while the weights change: is every token tagged with what sampled it?

The log-probs tell: each token has two, one under either policy, and the engine's must be the one
of the weights that its span names. Under `retract` they are exactly one or the other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from async_grpo.doctor.gaps import LIMITS, gap_between
from async_grpo.doctor.report import Finding, fail, ok, skipped
from async_grpo.doctor.subject import Sample, Subject
from async_grpo.doctor.two_policies import Which
from async_grpo.generation.update_modes import kv_tokens

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

    num_completions: int
    boundaries: list[tuple[int, int]]
    """(first token under the new weights, number of tokens) of each that crossed"""
    max_gap: float
    problem: str

    @property
    def undecided(self) -> bool:
        """None crossed, and nothing is wrong: try again."""
        return not self.boundaries and not self.problem

    def finding(self) -> Finding:
        """The verdict."""
        check, values = "spans", {"gap_max": self.max_gap}
        if self.problem:
            advice = (
                "staleness would be wrong for every completion in flight at an update: use an "
                "engine whose /generate returns weight_versions (SGLang 0.5.23 or later)"
            )
            return fail(check, self.problem, advice, values)
        if not self.boundaries:
            return skipped(check, "no completion was in flight at the moment of an update")
        told = ", ".join(f"{start} of {total}" for start, total in self.boundaries)
        figure = (
            f"{len(self.boundaries)} completions crossed an update at token {told}; every token "
            f"within {self.max_gap:.2g} nats of the weights its span names"
        )
        return ok(check, figure, values | {"num_crossed": float(len(self.boundaries))})


async def cross(
    subject: Subject, update: Callable[[], Awaitable[T]], policies: Mapping[str, Which]
) -> tuple[Crossing, T]:
    """Have completions in flight during `update`, and judge them.

    Args:
        subject: the engine.
        update: sends other weights, by retract.
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
    return await _judge(subject, samples, policies), result


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


async def _judge(
    subject: Subject, samples: list[Sample], policies: Mapping[str, Which]
) -> Crossing:
    limits = LIMITS[subject.config.policy.dtype]
    boundaries, worst, problem = [], 0.0, ""
    for sample in samples:
        under = {
            which: await subject.expected(sample, which) for which in (Which.OWN, Which.PERTURBED)
        }
        named: list[Which] = []
        for segment in sample.part.segments:
            which = policies.get(str(segment.weights))
            if which is None:
                problem = f"tokens are tagged {segment.weights}, which was never sent"
                break
            named += [which] * segment.num_tokens
        if problem:
            break
        expected = [under[which][position] for position, which in enumerate(named)]
        gap = gap_between(sample.part.logprobs, expected)
        worst = max(worst, gap.max)
        if not limits.hold(gap):
            problem = _contradiction(sample, under, policies)
            break
        if len(sample.part.segments) > 1:
            boundaries.append((sample.part.segments[0].num_tokens, len(named)))
    return Crossing(len(samples), boundaries, worst, problem)


def _contradiction(
    sample: Sample, under: Mapping[Which, list[float]], policies: Mapping[str, Which]
) -> str:
    """What the spans say, and where the log-probs switch."""
    told = ", ".join(f"{each.num_tokens} under {each.weights}" for each in sample.part.segments)
    after = policies[str(sample.part.segments[-1].weights)]
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
