"""Microseconds per token to encode, inspect and decode a large group, and a ratio to a memcpy.

    python tools/bench/codec.py [--completions 16] [--tokens 8192]

Exits 1 if encoding plus decoding costs more than 0.02 us per token.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from async_grpo.transport.codec import (
    GroupLimits,
    decode_group,
    encode_group,
    inspect_group,
    num_bytes,
)
from async_grpo.types import (
    Completion,
    FinishReason,
    Rollout,
    RolloutGroup,
    Segment,
    WeightsName,
)

LIMIT_US = 0.02
ROUNDS = 31


def make_group(num_completions: int, num_tokens: int) -> RolloutGroup:
    """A group whose completions were sampled by three versions."""
    random = np.random.default_rng(0)
    parts = (num_tokens // 2, num_tokens // 4, num_tokens - num_tokens // 2 - num_tokens // 4)

    def completion() -> Completion:
        return Completion(
            prompt_token_ids=random.integers(0, 150_000, 256, dtype=np.int32),
            token_ids=random.integers(0, 150_000, num_tokens, dtype=np.int32),
            behavior_logprobs=-random.random(num_tokens, dtype=np.float32),
            segments=[
                Segment(WeightsName(1, version), length) for version, length in enumerate(parts)
            ],
            finish_reason=FinishReason.LENGTH,
            temperature=1.0,
        )

    return RolloutGroup(1, 1, 0, [Rollout([completion()], 1.0) for _ in range(num_completions)])


def median_s(function: Callable[[], object]) -> float:
    """Median seconds of one call."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> int:
    """Measure and print one line per phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    group = make_group(options.completions, options.tokens)
    frames = [bytes(frame) for frame in encode_group(group)]
    size, tokens = num_bytes(frames), group.num_tokens
    limits = GroupLimits(
        max_bytes=size, max_completions=options.completions, max_tokens=options.tokens
    )
    source, target = np.zeros(size, np.uint8), np.ones(size, np.uint8)
    memcpy_s = median_s(lambda: np.copyto(target, source))
    encode_s = median_s(lambda: encode_group(group))
    decode_s = median_s(lambda: decode_group(frames))
    inspect_s = median_s(lambda: inspect_group(frames, limits))
    for name, seconds in (
        ("memcpy", memcpy_s),
        ("encode", encode_s),
        ("decode", decode_s),
        ("inspect", inspect_s),
    ):
        per_token = seconds / tokens * 1e6
        print(f"{name:8} {per_token:.5f} us per token, {seconds / memcpy_s:6.2f} x memcpy")
    total = (encode_s + decode_s) / tokens * 1e6
    print(f"encode + decode: {total:.5f} us per token (limit {LIMIT_US}), {size} bytes per group")
    return int(total > LIMIT_US)


if __name__ == "__main__":
    sys.exit(main())
