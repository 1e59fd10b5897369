"""What a run and its continuation must agree on: what is learned from what, and how.

Addresses, time-outs, limits of memory, devices and launching may differ: they change no number that
a train step computes. `run.num_train_steps` may grow.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from async_grpo.config.schema import Config

Values = dict[str, Any]
"""dotted field -> JSON value"""

_MAY_DIFFER: dict[str, tuple[str, ...]] = {
    # section that must agree: its fields that need not
    "run": ("output_dir", "num_train_steps", "no_progress_timeout_s"),
    "policy": ("maker", "maker_options"),
    "task": ("reward_workers", "reward_timeout_s"),
    "generation": ("max_running_groups", "request_timeout_s", "group_timeout_s"),
    "replay": (
        "address", "max_bytes", "max_groups", "max_group_bytes", "credit_bytes", "durability",
        "heartbeat_s", "peer_timeout_s", "request_timeout_s", "max_lost_claims",
    ),
    "staleness": (),
    "algorithm": (),
    "trainer": (
        "tokens_per_microbatch", "logprob_chunk_tokens", "threads", "device", "checkpoint_every",
        "keep_checkpoints", "self_test", "gradient_checkpointing", "attention", "memory_bytes",
    ),
    "weights": (
        "bucket_bytes", "backend", "host", "engines_per_cell", "timeout_s", "max_failures",
        "probe_tolerance", "transport", "late_transport", "directory", "download_directory",
        "check_names", "check_arrival",
    ),
    "eval": ("num_prompts", "num_completions", "temperature", "max_new_tokens", "timeout_s"),
}  # fmt: skip


def fixed_values(config: Config) -> Values:
    """Every field that a continuation must have as it was."""
    values: Values = {}
    for section, free in _MAY_DIFFER.items():
        for name, value in asdict(getattr(config, section)).items():
            if name not in free:
                values[f"{section}.{name}"] = value
    # As text, since JSON has no infinity.
    plain: Values = json.loads(json.dumps(values), parse_constant=str)
    return plain


def values_digest(values: Mapping[str, Any]) -> str:
    """A hash of `fixed_values`."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line per field that differs, naming both values; empty: the run may be continued."""
    missing = "nothing"
    return [
        f"{name}: the run has {before.get(name, missing)!r}, now it is {after.get(name, missing)!r}"
        for name in sorted({*before, *after})
        if before.get(name, missing) != after.get(name, missing)
    ]


def resume_problems(before: Config, after: Config) -> list[str]:
    """Why a run that was started as `before` cannot be continued as `after`."""
    problems = differences(fixed_values(before), fixed_values(after))
    steps, more_steps = before.run.num_train_steps, after.run.num_train_steps
    if more_steps < steps:
        problems.append(
            f"run.num_train_steps may grow: the run has {steps}, now it is {more_steps}"
        )
    return problems
