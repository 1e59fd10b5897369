"""What the trainer and the generators wrote down, compared with the ledger."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from async_grpo.analysis.ledger_reading import Json, Key, LedgerReading, Step


def check_steps(reading: LedgerReading, lines: Iterable[Json]) -> list[str]:
    """Differences between the ledger's acked steps and the trainer's step log.

    The trainer writes a step before it acks it, so the log may hold steps that were never acked
    (the trainer died in between); the ledger may not hold one that the log does not.
    """
    problems: list[str] = []
    written: dict[tuple[int, int], Json] = {}
    for line in lines:
        try:
            key = (line["incarnation"], line["step"])
            if line["policy_version"] != line["step"] + 1:
                problems.append(f"steps: {key} has policy_version {line['policy_version']}")
        except (KeyError, TypeError) as error:
            problems.append(f"steps: a line cannot be understood ({error!r})")
            continue
        if key in written:
            problems.append(f"steps: incarnation {key[0]} wrote step {key[1]} twice")
        written[key] = line
    for step in [*reading.voided, *reading.steps]:
        found = written.get((step.incarnation, step.step))
        where = f"step {step.step} of incarnation {step.incarnation}"
        if found is None:
            problems.append(f"steps: {where} is acked in the ledger, the trainer never wrote it")
            continue
        try:
            problems += [f"steps: {where}: {text}" for text in _compare(reading, step, found)]
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"steps: {where} cannot be understood ({error!r})")
    return problems


def _compare(reading: LedgerReading, step: Step, line: Json) -> Iterable[str]:
    """Every difference between one acked step and the trainer's line about it."""
    groups: dict[Key, Json] = {(g["group_id"], g["attempt"]): g for g in line["groups"]}
    if len(groups) != len(line["groups"]):
        yield "the trainer names a group twice"
    if sorted(groups) != sorted(step.groups):
        yield f"the trainer trained {sorted(groups)}, the ledger says {sorted(step.groups)}"
    if line["draw_number"] != step.draw_number:
        yield f"draw {line['draw_number']}, the ledger says {step.draw_number}"
    total = sum(group["num_tokens"] for group in groups.values())
    if line["num_tokens"] != total:
        yield f"num_tokens {line['num_tokens']}, its groups have {total}"
    ages = [group["staleness"] for group in groups.values()]
    if min(ages, default=0) < 0:
        yield f"staleness {min(ages)}: a token of weights that did not exist yet was trained"
    if line["max_staleness"] != max(ages, default=0):
        yield f"max_staleness {line['max_staleness']}, its groups have {max(ages, default=0)}"
    for key, group in groups.items():
        stored = reading.stored.get(key)
        if stored is None:
            continue
        not_before = reading.not_before(step.step)
        incarnation, version = stored.oldest(not_before)
        expected = {
            "num_tokens": stored.num_tokens,
            "num_over_age": stored.num_before(not_before),
            "oldest": f"{incarnation}.{version}",
            "staleness": step.step - version,
        }
        for name, value in expected.items():
            if group[name] != value:
                yield f"group {key} has {name} {group[name]}, the ledger says {value}"


def check_generators(
    reading: LedgerReading, *, acknowledged: Iterable[Json], sent: Iterable[Json]
) -> list[str]:
    """Differences between stored attempts and what generators say.

    A group that was sent need not be stored (the server died before it arrived).

    Args:
        reading: the ledger.
        acknowledged: lines of the generators' logs, read before the ledger.
        sent: the same, read after it.
    """
    problems: list[str] = []
    token_counts: dict[Key, list[Any]] = defaultdict(list)
    for line in sent:
        try:
            if line["event"] == "sent":
                key = (line["group_id"], line["attempt"])
                token_counts[key].append(line["num_tokens"])
        except (KeyError, TypeError) as error:
            problems.append(f"generators: a line cannot be understood ({error!r})")
    for key, stored in reading.stored.items():
        counts = token_counts.get(key, [])
        if not counts:
            problems.append(f"generators: group {key} is stored in the ledger, nobody sent it")
        elif stored.num_tokens not in counts:
            problems.append(
                f"generators: group {key} was sent with {counts} tokens, the ledger says "
                f"{stored.num_tokens}"
            )
    answered = {
        (line.get("group_id"), line.get("attempt"))
        for line in acknowledged
        if line.get("event") == "answered" and line.get("outcome") in ("stored", "duplicate")
    }
    missing = [key for key in answered if key not in reading.stored]
    problems += [
        f"generators: group {key} was acknowledged as stored, the ledger does not have it"
        for key in sorted(missing, key=str)
    ]
    return problems
