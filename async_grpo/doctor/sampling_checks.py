"""What the engine samples and what it says of it, against the trainer's own forward."""

import asyncio
import math
from itertools import chain

from async_grpo.config.weights import LARGEST_TO_MEAN
from async_grpo.doctor.gaps import Gap, gap_between
from async_grpo.doctor.report import Finding, fail, ok
from async_grpo.doctor.subject import Sample, Subject
from async_grpo.doctor.two_policies import Which
from async_grpo.errors import GenerationError
from async_grpo.weights.probing import ProbeGap

_SAMPLES_PER_PROMPT = 4
_MAX_NEW_TOKENS = 48
_OTHER_TEMPERATURES = (0.7, 1.3)
_LEAST_Z = -5.0
"""Standard errors below the expected surprisal. Sums of surprisals are skewed upward, so their
lower tail is lighter than a normal one's, where this happens once in three million."""
_MIN_VARIANCE = 1e-3
"""nats squared, summed; below it the policy is so certain that nothing can be told."""
_NUM_NEIGHBORS = 7
_TRUNCATED_TOP_K = 2


def other_temperature(temperature: float) -> float:
    """One that differs enough from the run's for scaling to show."""
    return max(_OTHER_TEMPERATURES, key=lambda other: abs(other - temperature))


async def take_samples(subject: Subject, temperature: float) -> list[Sample]:
    """Completions of every prompt, sampled side by side as a run samples them."""
    longest = max(len(prompt) for prompt in subject.prompts)
    wanted = min(_MAX_NEW_TOKENS, subject.config.generation.max_new_tokens)
    num_tokens = max(1, min(wanted, subject.context - longest - 1))
    return await asyncio.gather(
        *(
            subject.sample(prompt, num_tokens, temperature=temperature, namespace=subject.namespace)
            for prompt in subject.prompts
            for _ in range(_SAMPLES_PER_PROMPT)
        )
    )


async def check_logprobs(
    subject: Subject, samples: list[Sample], temperature: float
) -> tuple[Finding, Gap]:
    """That the engine's log-probs of what it sampled are the trainer's, at `temperature`."""
    check = f"log-probs, T={temperature:g}"
    gap = await _gap(subject, samples)
    if subject.limits.hold(gap):
        return ok(check, str(gap), gap.values()), gap
    return fail(check, str(gap), await _cause(subject, samples, temperature), gap.values()), gap


async def _gap(subject: Subject, samples: list[Sample], at: float | None = None) -> Gap:
    """Between the engine's log-probs and the trainer's at temperature `at`."""
    expected = [
        await asyncio.to_thread(
            subject.policies.logprobs,
            subject.which,
            sample.prompt,
            sample.part.token_ids,
            at or sample.temperature,
        )
        for sample in samples
    ]
    return gap_between(
        list(chain.from_iterable(sample.part.logprobs for sample in samples)),
        list(chain.from_iterable(expected)),
    )


async def _cause(subject: Subject, samples: list[Sample], temperature: float) -> str:
    """What to do about a gap, by what explains it."""
    dtype = subject.config.policy.dtype
    if temperature != 1 and subject.limits.hold(await _gap(subject, samples, at=1.0)):
        return (
            "the engine's log-probs are not divided by the temperature: start it without what "
            "returns original log-probs (SGLANG_RETURN_ORIGINAL_LOGPROB), or sample at "
            "temperature 1"
        )
    if subject.info.dtype not in ("auto", dtype.value):
        return (
            f"the engine computes in {subject.info.dtype}, the trainer in {dtype.value}: start the "
            f"engine with --dtype {dtype.value}, or set policy.dtype={subject.info.dtype}"
        )
    return (
        "the engine computes another function than the trainer: compare quantization, attention "
        "backend, rope and sampling flags of the engine with the model's configuration"
    )


async def check_distribution(subject: Subject, samples: list[Sample]) -> Finding:
    """That it samples from the full distribution, and that its log-probs are of that one.

    Two parts: a request for a truncated distribution, which the configuration cannot express, is
    refused or answered with log-probs of the full one; and the completions that a run would get
    are as surprising, on average, as the full distribution makes them.
    """
    check = "distribution"
    full, truncated = await _truncated(subject)
    if not full:
        return fail(
            check,
            truncated,
            "never sample training data with top_p, top_k or min_p on this engine (a server's "
            "--preferred-sampling-params do not count: every request names its own)",
        )
    surprisal = -sum(chain.from_iterable(sample.part.logprobs for sample in samples))
    mean = variance = 0.0
    for sample in samples:
        moments = await asyncio.to_thread(
            subject.policies.surprisal_moments,
            subject.which,
            sample.prompt,
            sample.part.token_ids,
            sample.temperature,
        )
        mean, variance = mean + moments[0], variance + moments[1]
    num_tokens = sum(len(sample.part.token_ids) for sample in samples)
    z = (surprisal - mean) / math.sqrt(max(variance, _MIN_VARIANCE))
    figure = (
        f"surprisal {surprisal / num_tokens:.3f}, entropy {mean / num_tokens:.3f} nats per token "
        f"(z {z:+.1f}, {num_tokens} tokens); {truncated}"
    )
    values = {"surprisal": surprisal / num_tokens, "entropy": mean / num_tokens, "z": z}
    if z < _LEAST_Z:
        advice = (
            "the engine samples likelier tokens than it says: look for flags that truncate or "
            "sharpen (top_p, top_k, min_p, temperature, penalties) or for speculative decoding"
        )
        return fail(check, figure, advice, values)
    return ok(check, figure, values)


async def _truncated(subject: Subject) -> tuple[bool, str]:
    """What comes of a request with top_k: whether it misleads nobody, and how."""
    prompt = subject.prompts[0]
    name = f"top_k={_TRUNCATED_TOP_K}"
    try:
        sample = await subject.sample(
            prompt,
            min(_MAX_NEW_TOKENS, subject.context - len(prompt) - 1),
            namespace=subject.namespace,
            top_k=_TRUNCATED_TOP_K,
        )
    except GenerationError as error:
        if error.retryable:
            raise
        return True, f"{name} is refused"
    gap = await _gap(subject, [sample])
    if subject.limits.hold(gap):
        return True, f"log-probs under {name} are of the full distribution"
    return False, f"log-probs under {name} are of the truncated one: off by {gap.mean:.2g} nats"


async def check_noise(subject: Subject, samples: list[Sample], gap: Gap) -> Finding:
    """How far log-probs of the same ids differ for no reason but rounding.

    Args:
        subject: the engine.
        samples: completions at the run's temperature; the longest one is scored.
        gap: of those completions, engine against trainer.
    """
    check = "noise floor"
    sample = max(samples, key=lambda each: len(each.part.token_ids))
    ids = [*sample.prompt, *sample.part.token_ids]
    first = await subject.prompt_logprobs(ids)
    alone = gap_between(await subject.prompt_logprobs(ids), first)
    neighbors = (
        subject.sample(sample.prompt, len(sample.part.token_ids), namespace=subject.namespace)
        for _ in range(_NUM_NEIGHBORS)
    )
    crowd = asyncio.gather(*neighbors)
    crowded = gap_between(await subject.prompt_logprobs(ids), first)
    await crowd
    own = await asyncio.to_thread(
        subject.policies.logprobs, Which(subject.which), ids[:1], ids[1:], 1.0
    )
    prefill = gap_between(first, own)
    gaps = (alone, crowded, prefill)
    limits = subject.policies.probe_limits
    floor = ProbeGap(max(each.mean for each in gaps), max(each.max for each in gaps))
    figure = (
        f"engine twice {alone.max:.2g}, beside others {crowded.max:.2g}; prefill against trainer "
        f"{prefill.max:.2g}; sampled against trainer: {gap}"
    )
    values = {"twice": alone.max, "beside_others": crowded.max, "prefill": prefill.max}
    if not floor.within(limits.mean, limits.largest):
        raised = 2 * max(floor.mean, floor.largest / LARGEST_TO_MEAN)
        advice = (
            f"the probe after each weight update would fail for no reason: set "
            f"weights.probe_tolerance ({limits.mean:.2g} now) to {raised:.1g}, if the other lines "
            "are ok; else mend those first"
        )
        return fail(check, figure, advice, values | gap.values("sampled_"))
    return ok(check, figure, values | gap.values("sampled_"))
