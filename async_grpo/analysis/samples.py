"""`async-grpo samples`: the completions that a run kept for people, as plain text.

What a model wrote may hold anything, so nothing reaches the terminal but printable characters and
line ends; all else is shown as an escape.
"""

import json
import logging
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from async_grpo.config.run_directory import RunDirectory
from async_grpo.errors import ConfigError

logger = logging.getLogger(__name__)

Sample = dict[str, Any]


def read_samples(
    run_dir: Path, *, step: int | None = None, last: int | None = None
) -> list[Sample]:
    """The samples of a run, by policy version, then in the order in which they were written.

    Args:
        run_dir: of the run.
        step: only those whose newest token was sampled by this policy version.
        last: only those of the last so many policy versions.

    Raises:
        ConfigError: there is no such file, or no sample of `step`.
    """
    path = RunDirectory(run_dir).samples
    samples = sorted(_read(path), key=lambda sample: sample["policy_version"])
    versions = sorted({sample["policy_version"] for sample in samples})
    if step is not None:
        if step not in versions:
            raise ConfigError(f"{path} holds no sample of step {step}; {_which(versions)}")
        versions = [step]
    elif last is not None:
        versions = versions[-last:] if last > 0 else []
    chosen = set(versions)
    return [sample for sample in samples if sample["policy_version"] in chosen]


def _read(path: Path) -> Iterator[Sample]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; a generator writes it unless "
            "metrics.max_samples_per_step is 0"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
        except ValueError as error:
            if number < len(lines):  # the last one may be torn: its writer is still writing
                logger.warning("%s, line %d is no JSON and is left out: %s", path, number, error)
            continue
        if isinstance(sample, dict) and isinstance(sample.get("policy_version"), int):
            yield sample
        else:
            logger.warning("%s, line %d is no sample and is left out", path, number)


def _which(versions: Sequence[int]) -> str:
    if not versions:
        return "it is empty"
    return f"it holds steps {versions[0]} to {versions[-1]}"


def format_samples(samples: Iterable[Sample]) -> str:
    """All samples, one below the other."""
    blocks = ["\n".join(_format(sample)) for sample in samples]
    return "\n\n".join(blocks) if blocks else "no samples"


def _format(sample: Sample) -> Iterator[str]:
    kind = "evaluation, " if sample.get("kind") == "eval" else ""
    yield printable(
        f"=== step {sample['policy_version']}, {kind}group {sample.get('group_id')}, "
        f"attempt {sample.get('attempt')}: {sample.get('outcome')} ===",
        keep_lines=False,
    )
    yield "prompt:"
    yield _indented(sample.get("prompt"))
    yield f"completion ({sample.get('num_tokens')} tokens, ended by {sample.get('finish_reason')}):"
    yield _indented(sample.get("text"))
    yield f"reward:   {_reward(sample)}; expected {printable(_quoted(sample.get('answer')))}"
    yield f"versions: {_versions(sample.get('segments') or [])}"


def _reward(sample: Sample) -> str:
    reward = sample.get("reward")
    shown = "none" if reward is None else f"{reward:g}"
    parts = sample.get("reward_parts") or {}
    if parts:
        shown += " = " + " + ".join(f"{name} {value:g}" for name, value in sorted(parts.items()))
    outcome = sample.get("reward_outcome")
    return printable(f"{shown} ({outcome})", keep_lines=False)


def _versions(segments: Sequence[dict[str, Any]]) -> str:
    shown = []
    for segment in segments:
        weights = segment.get("weights") or "no policy"
        mixed = ", KV of earlier weights" if segment.get("kv_mixed") else ""
        shown.append(f"{weights} ({segment.get('num_tokens')} tokens{mixed})")
    return printable(", then ".join(shown) or "unknown", keep_lines=False)


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _indented(value: Any) -> str:
    text = printable(value if isinstance(value, str) else "")
    return textwrap.indent(text, "  | ", lambda line: True) or "  | "


def printable(text: str, *, keep_lines: bool = True) -> str:
    """`text` with every character that could move the cursor or hide something as an escape."""
    return "".join(
        character
        if character.isprintable() or (keep_lines and character == "\n")
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
