"""Records per second that a start of the replay server restores, with and without a snapshot.

    python tools/bench/ledger_restore.py [--records 1000000] [--groups-per-step 128]

The ledger is that of a long run: per ticket three records of its own, and a share of a step's. The
bound of any start that reads every record is measured in the same run, on the same bytes: JSON
decoding alone, into plain objects. A start with a snapshot reads at most `EVERY_RECORDS` records;
that worst case is what is timed. All times are CPU seconds of one process. Exits 1 if a start with
a snapshot restores fewer than one million records a second.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from async_grpo.replay.core.core import ReplayCore
from async_grpo.replay.core.records import (
    Announced,
    Claimed,
    DatasetAgreed,
    Drawn,
    Made,
    Record,
    Settled,
    Stored,
    Trained,
    TrainerStarted,
    WentLive,
    decode_record,
    encode_record,
)
from async_grpo.replay.core.settings import CoreSettings
from async_grpo.replay.snapshots import EVERY_RECORDS, Snapshots
from async_grpo.replay.store import Ledger
from async_grpo.replay_parts import GeneratedStats, GroupSummary, LeasedGroup
from async_grpo.types import TicketKind, WeightsName

LIMIT = 1_000_000
"""Records per second."""
GROUP_SIZE, NUM_TOKENS = 16, 4096
KEPT_STEPS = 75
"""Steps that a checkpoint may still undo."""


def run_records(groups_per_step: int) -> Iterator[Record]:
    """What a run without faults writes, for ever."""
    yield DatasetAgreed(fingerprint="0123456789abcdef", num_prompts=12_000)
    yield TrainerStarted(incarnation=1, restored_version=0, instance="trainer#0f3a9c")
    step = 0
    while True:
        weights = WeightsName(1, step)
        yield Announced(
            incarnation=1, number=step + 1, publish_sequence=step + 1, weights=weights, cells=[]
        )
        yield WentLive(weights=weights, publish_sequence=step + 1)
        groups = range(step * groups_per_step, (step + 1) * groups_per_step)
        for group_id in groups:
            yield from _records_of_group(group_id, weights)
        yield Drawn(
            incarnation=1,
            draw_number=step + 1,
            train_version=step,
            groups=[_leased(group_id, weights) for group_id in groups],
            generated=GeneratedStats(),
        )
        keys = [(group_id, 1) for group_id in groups]
        yield Trained(incarnation=1, step=step, draw_number=step + 1, groups=keys)
        step += 1
        if step % 25 == 0 and step > KEPT_STEPS:
            yield Settled(incarnation=1, policy_version=step - KEPT_STEPS)


def _records_of_group(group_id: int, weights: WeightsName) -> Iterator[Record]:
    yield Made(group_id=group_id, prompt_index=group_id % 12_000, kind=TicketKind.TRAIN)
    yield Claimed(
        group_id=group_id,
        attempt=1,
        instance="generator-0#4be1d2",
        generator="generator-0",
        number=group_id + 1,
    )
    yield Stored(
        summary=GroupSummary(
            group_id=group_id,
            attempt=1,
            num_bytes=NUM_TOKENS * GROUP_SIZE * 8,
            num_tokens=NUM_TOKENS * GROUP_SIZE,
            num_completions=GROUP_SIZE,
            reward_sum=7.0,
            weights_tokens=[(weights, NUM_TOKENS * GROUP_SIZE)],
        )
    )


def _leased(group_id: int, weights: WeightsName) -> LeasedGroup:
    return LeasedGroup(
        group_id=group_id,
        attempt=1,
        prompt_index=group_id % 12_000,
        num_bytes=NUM_TOKENS * GROUP_SIZE * 8,
        num_tokens=NUM_TOKENS * GROUP_SIZE,
        oldest=weights,
        in_queue_s=12.3456789,
    )


def settings_of(groups_per_step: int) -> CoreSettings:
    """Of such a run."""
    return CoreSettings(
        groups_per_step=groups_per_step,
        num_train_steps=1 << 30,
        max_staleness=4,
        pipeline_depth=2,
        max_groups=4 * groups_per_step,
    )


def write_run(ledger: Ledger, snapshots: Snapshots, settings: CoreSettings, total: int) -> float:
    """Records of a run, with a snapshot that is as old as one can be; seconds to write it."""
    records = run_records(settings.groups_per_step)
    core = ReplayCore(settings)
    seconds = 0.0
    lines: list[bytes] = []
    for number, record in zip(range(1, total + 1), records, strict=False):
        core.state.evolve(record)
        lines.append(encode_record(record))
        if number == total - EVERY_RECORDS:
            ledger.append(lines)
            lines.clear()
            started = time.process_time()
            snapshots.save(core.state, ledger, number)
            seconds = time.process_time() - started
    ledger.append(lines)
    return seconds


def restore(settings: CoreSettings, ledger: Ledger, snapshots: Snapshots | None) -> float:
    """Seconds of a start, as the server does it."""
    started = time.process_time()
    beginning = snapshots.load(ledger) if snapshots is not None else None
    assert (beginning is None) == (snapshots is None), "the snapshot is of no use"
    offset = 0 if beginning is None else beginning.offset
    records = map(decode_record, ledger.lines(offset))
    ReplayCore.restore(settings, records, 1.0, state=beginning.state if beginning else None)
    return time.process_time() - started


def decode_only(ledger: Ledger) -> float:
    """Seconds to read and decode the same lines, into plain objects."""
    started = time.process_time()
    decode = msgspec.json.Decoder().decode
    for line in ledger.lines():
        decode(line)
    return time.process_time() - started


def main() -> int:
    """Print a table; exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--groups-per-step", type=int, default=128)
    args = parser.parse_args()
    total = max(args.records, 2 * EVERY_RECORDS)
    settings = settings_of(args.groups_per_step)
    with tempfile.TemporaryDirectory() as place:
        ledger = Ledger(Path(place) / "ledger.jsonl")
        snapshots = Snapshots(Path(place) / "ledger.snapshot", settings)
        saving_s = write_run(ledger, snapshots, settings, total)
        num_bytes = (Path(place) / "ledger.snapshot").stat().st_size
        bound_s = decode_only(ledger)
        whole_s = restore(settings, ledger, None)
        short_s = restore(settings, ledger, snapshots)
        size = ledger.size
        ledger.close()
    print(f"{total} records, {size / total:.0f} bytes each; snapshot {num_bytes / 1e6:.2f} MB")
    print(f"{'':34} {'CPU s':>8} {'records/s':>12} {'us/record':>10}")
    for name, seconds in (
        ("decoding JSON only (the bound)", bound_s),
        ("every record, no snapshot", whole_s),
        (f"snapshot and {EVERY_RECORDS} records", short_s),
    ):
        print(f"{name:34} {seconds:8.2f} {total / seconds:12.0f} {1e6 * seconds / total:10.2f}")
    print(f"every record / bound: {whole_s / bound_s:.2f}")
    print(f"snapshot / bound: {short_s / bound_s:.2f}")
    print(f"writing a snapshot: {1000 * saving_s:.0f} ms each {EVERY_RECORDS} records")
    return int(total / short_s < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
