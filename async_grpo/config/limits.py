"""Time limits that are shorter than what has to happen within them: warned of, with the value."""

from collections.abc import Iterator
from math import ceil

from async_grpo.config.engine import EngineKind
from async_grpo.config.policy import DType
from async_grpo.config.schema import Config

SLOWEST_TOKENS_PER_S = 20
"""Of one request on a full engine; a completion at full length must fit at this speed."""
SGLANG_WATCHDOG_S = 300.0
"""SGLang's default of `--watchdog-timeout`; past it a scheduler that makes no progress is ended,
also in an update that keeps requests in place."""
CHECKPOINT_BYTES_PER_S = 3e8
"""To one disk by one writer."""
CHECKPOINT_BYTES = {DType.float32: 12, DType.bfloat16: 14, DType.float64: 24}
"""Of one parameter: weights and two moments; in bfloat16 float32 masters and moments besides."""
TRAINER_SHARE = 0.6
"""Of `launch.shutdown_timeout_s`."""


def time_warnings(config: Config) -> Iterator[str]:
    """Limits that long completions or slow updates pass."""
    generation = config.generation
    request_s, group_s = generation.request_timeout_s, generation.group_timeout_s
    needed_s = ceil(generation.max_new_tokens / SLOWEST_TOKENS_PER_S)
    speed = f"max_new_tokens ({generation.max_new_tokens}) at {SLOWEST_TOKENS_PER_S} tokens/s"
    if group_s < needed_s:
        yield (
            f"generation.group_timeout_s ({group_s:g}) is below {needed_s}, which {speed} take: "
            "groups with long completions are given up, so mostly short ones are trained"
        )
    if request_s < needed_s:
        yield (
            f"generation.request_timeout_s ({request_s:g}) is below {needed_s}, which {speed} "
            "take: requests are aborted and continued, and each time their KV is computed again"
        )
    if group_s < request_s:
        yield (
            f"generation.group_timeout_s ({group_s:g}) is below generation.request_timeout_s "
            f"({request_s:g}), which has no effect then"
        )
    watchdog_s = _watchdog_s(config.engine.server_args)
    if config.engine.kind == EngineKind.sglang and config.weights.timeout_s >= watchdog_s:
        yield (
            f"weights.timeout_s ({config.weights.timeout_s:g}) is not below SGLang's watchdog "
            f"({watchdog_s:g} s), which ends engines in a slow update: lower it, or raise "
            "--watchdog-timeout in engine.server_args"
        )


def checkpoint_warning(config: Config, num_parameters: int) -> str:
    """Whether a stop leaves no time for its checkpoint; empty if it does."""
    size = CHECKPOINT_BYTES[config.policy.dtype] * num_parameters
    needed_s = size / CHECKPOINT_BYTES_PER_S / TRAINER_SHARE
    if config.launch.shutdown_timeout_s >= needed_s:
        return ""
    return (
        f"launch.shutdown_timeout_s ({config.launch.shutdown_timeout_s:g}) is below "
        f"{ceil(needed_s)}: a checkpoint of {size / 2**30:.3g} GiB at "
        f"{CHECKPOINT_BYTES_PER_S / 1e9:g} GB/s does not fit six tenths of it, so a stop loses the "
        "steps since the last one"
    )


def _watchdog_s(server_args: list[str]) -> float:
    """What `--watchdog-timeout` says, in either spelling; the last one counts."""
    found = SGLANG_WATCHDOG_S
    for position, argument in enumerate(server_args):
        flag, equals, value = argument.partition("=")
        if flag == "--watchdog-timeout":
            following = server_args[position + 1] if position + 1 < len(server_args) else ""
            try:
                found = float(value if equals else following)
            except ValueError:
                continue  # SGLang refuses it with its own words
    return found
