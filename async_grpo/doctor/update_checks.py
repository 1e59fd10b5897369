"""Weight updates, there and back: do they arrive whole, leave no stale prefix, tag tokens rightly?

    own weights -> perturbed ones (retract, with completions in flight) -> own ones (in_place)

One update serves three checks: the round trip, the completions that cross it, the prefixes that
were cached before it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from async_grpo.config.policy import DType
from async_grpo.doctor.crossing import cross, spans_finding
from async_grpo.doctor.gaps import Gap, gap_between
from async_grpo.doctor.report import Finding, fail, ok
from async_grpo.doctor.subject import Sample, Subject
from async_grpo.doctor.two_policies import Which
from async_grpo.doctor.weight_link import Sent, WeightLink
from async_grpo.engine_api import PauseMode
from async_grpo.errors import GenerationError
from async_grpo.generation.update_modes import in_place_is_safe
from async_grpo.replay_parts import ProbeIds
from async_grpo.weights.probing import fitting, probe_gap

_MAX_PREFIX_TOKENS = 192
"""More than a block of any engine's prefix cache."""
_PREFIX_SAMPLE_TOKENS = 4
_PROBE_MARGIN = 6
"""Positions of its context that SGLang wants besides a prompt."""
_MAX_MORE_TRIES = 4
"""Updates after the first until a completion was in flight at the right moment."""
_EXPLAINS = 0.5
"""Of the gap without it."""
_NAMED = 3
"""Suspects that a message lists."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An update, and what the engine computes after it."""

    which: Which
    sent: Sent
    gap: Gap
    problem: str
    """why it did not arrive; empty: it did"""


class Updates:
    """Updates of one engine, each followed by the probe of a run.

    Args:
        subject: the engine.
        link: to send by.
    """

    def __init__(self, subject: Subject, link: WeightLink) -> None:
        self._subject, self._link = subject, link
        self._policies: dict[str, Which] = {}
        self._limits = subject.policies.probe_limits
        self._coarse = subject.config.policy.dtype is DType.bfloat16

    async def start(self) -> Arrival:
        """Give the engine the policy's weights, as a run's first update does.

        Raises:
            WeightSyncError: it refused them.
        """
        return await self._send(Which.OWN, PauseMode.RETRACT)

    async def check(self, start: Arrival) -> AsyncIterator[Finding]:
        """Round trip, prefix cache and spans; the engine ends with the policy's own weights.

        Args:
            start: of `start`.

        Raises:
            WeightSyncError: an update was refused.
        """
        subject, cache = self._subject, PrefixCache(self._subject)
        await cache.fill()
        retract, there = await cross(subject, PauseMode.RETRACT, self._turn, self._policies)
        crossings, stale = [retract], {PauseMode.RETRACT: await cache.gaps()}
        await cache.fill()
        if in_place_is_safe(subject.info):
            in_place, back = await cross(
                subject, PauseMode.IN_PLACE, self._back_in_place, self._policies
            )
            crossings.append(in_place)
            stale[PauseMode.IN_PLACE] = await cache.gaps()
        else:
            back = await self._turn()
        with suppress(GenerationError):  # whoever uses the engine next finds no entry of ours
            await subject.client.flush_cache()
        yield _round_trip(subject, start, there, back)
        yield cache.finding(stale, flushed=not there.sent.kv_kept)
        for _ in range(_MAX_MORE_TRIES):
            if crossings[0].undecided:
                crossings[0], _ = await cross(
                    subject, PauseMode.RETRACT, self._turn, self._policies
                )
        yield spans_finding(crossings)
        if subject.which is not Which.OWN:
            await self._turn()

    async def _back_in_place(self) -> Arrival:
        return await self._send(Which.OWN, PauseMode.IN_PLACE)

    async def _turn(self) -> Arrival:
        """Send the other policy, by retract."""
        own = self._subject.which is Which.OWN
        return await self._send(Which.PERTURBED if own else Which.OWN, PauseMode.RETRACT)

    async def _send(self, which: Which, mode: PauseMode) -> Arrival:
        subject = self._subject
        sent = await self._link.send(which, mode)
        self._policies[str(sent.weights)] = which
        room = subject.context - _PROBE_MARGIN
        probe = fitting(await asyncio.to_thread(subject.policies.probe, which), room)
        found = await subject.prompt_logprobs(probe.token_ids)
        gap = gap_between(found, probe.logprobs)
        close = probe_gap(found, probe.logprobs).within(self._limits.mean, self._limits.largest)
        suspects: list[str] = []
        if self._coarse or not close:
            suspects = await asyncio.to_thread(self._suspects, which, probe, found, gap)
        problem = ""
        if suspects or not close:
            problem = f"after weights {sent.weights} log-probs are off by {gap.max:.2g} nats"
        if suspects:
            more = f" or {len(suspects) - _NAMED} others" if len(suspects) > _NAMED else ""
            problem += f", as if {' or '.join(suspects[:_NAMED])}{more} had not arrived"
        elif sent.alarms and not problem:
            problem = "; ".join(sent.alarms)
        return Arrival(which, sent, gap, problem)

    def _suspects(
        self, which: Which, probe: ProbeIds, found: Sequence[float], gap: Gap
    ) -> list[str]:
        """Tensors whose absence explains what the engine computes far better, the best first.

        Compares explanations, not sizes: so it also sees what a coarse dtype's rounding hides.
        """
        others = [
            (gap_between(found, logprobs).mean, name)
            for name, logprobs in self._subject.policies.without_each(which, probe)
        ]
        return [name for mean, name in sorted(others) if mean < _EXPLAINS * gap.mean]


def _round_trip(subject: Subject, start: Arrival, there: Arrival, back: Arrival) -> Finding:
    check = "weights"
    seconds = max(each.sent.seconds for each in (start, there, back))
    worst = max(each.gap.max for each in (start, there, back))
    values = {"update_s": seconds, "probe_gap": worst}
    problem = start.problem or there.problem or back.problem
    checksums = [each.sent.checksum for each in (start, there, back)]
    if all(checksums):
        if checksums[1] == checksums[0]:
            problem = problem or "the checksum did not change with the weights"
        if checksums[2] != checksums[0]:
            problem = problem or "the checksum did not come back with the weights"
    if problem:
        advice = (
            "the engine acknowledges updates that it does not apply: compare its architecture and "
            "tensor names with policy.model's, and its version with those in docs/doctor.md"
        )
        return fail(check, problem, advice, values)
    shown = "no checksum, which this server is too old for"
    if all(checksums):
        shown = "checksum " + " -> ".join(checksum[:8] for checksum in checksums)
    return ok(
        check,
        f"{len(subject.policies.names)} tensors perturbed, sent and sent back: {shown}, "
        f"probe within {worst:.2g} nats, {seconds:.2g} s an update",
        values,
    )


class PrefixCache:
    """One prompt, cached before an update and asked for after it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        length = min(_MAX_PREFIX_TOKENS, subject.context - 2 * _PREFIX_SAMPLE_TOKENS)
        generator = torch.Generator().manual_seed(subject.config.run.seed + 1)
        vocab_size = subject.policies.model.vocab_size
        self._prompt: list[int] = torch.randint(
            0, vocab_size, (length,), generator=generator
        ).tolist()
        self._num_cached = 0

    async def fill(self) -> None:
        """Have the prompt's KV cached, under the present weights' namespace and under none."""
        for namespace in (self._subject.namespace, None):
            for _ in range(2):
                sample = await self._sample(namespace)
            self._num_cached = max(self._num_cached, sample.reply.meta_info.cached_tokens)

    async def gaps(self) -> tuple[Gap, Gap]:
        """After an update: as requests of a run are sent, and without a namespace."""
        with_namespace = await self._gap(self._subject.namespace)
        return with_namespace, await self._gap(None)

    async def _gap(self, namespace: str | None) -> Gap:
        sample = await self._sample(namespace)
        return gap_between(sample.part.logprobs, await self._subject.expected(sample))

    async def _sample(self, namespace: str | None) -> Sample:
        return await self._subject.sample(
            self._prompt, _PREFIX_SAMPLE_TOKENS, namespace=namespace, ignore_eos=True
        )

    def finding(self, stale: dict[PauseMode, tuple[Gap, Gap]], *, flushed: bool) -> Finding:
        """The verdict.

        Args:
            stale: by the pause mode of the update, what `gaps` found after it.
            flushed: the engine said that it dropped its cache in the update by retract.
        """
        check, limits = "prefix cache", self._subject.limits
        parts, values = [], {"cached_tokens": float(self._num_cached)}
        problem = ""
        for mode, (named, bare) in stale.items():
            parts.append(f"{mode}: {named.max:.2g} with namespace, {bare.max:.2g} without")
            values |= {f"{mode}_namespace_max": named.max, f"{mode}_bare_max": bare.max}
            if not limits.hold(named):
                problem = f"after an update by {mode} a new namespace reads KV of weights before"
            elif not limits.hold(bare) and mode is PauseMode.RETRACT and flushed:
                problem = "KV of the weights before is served though /flush_cache was acknowledged"
        kind = f"{self._num_cached} tokens cached" if self._num_cached else "nothing is cached"
        figure = f"{kind}; nats off after {'; '.join(parts)}"
        if problem:
            advice = f"{problem}: start the engine without a prefix cache (--disable-radix-cache)"
            return fail(check, figure, advice, values)
        return ok(check, figure, values)
