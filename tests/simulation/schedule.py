"""What one seed decides: the run's settings and its faults."""

import random
from dataclasses import dataclass, replace
from typing import Any

from async_grpo.config.staleness import DrawOrder, OnStale, OverAge
from async_grpo.replay.core.settings import CoreSettings

GROUP_BYTES = (10, 20)


@dataclass(frozen=True)
class Schedule:
    """One simulated run."""

    seed: int
    settings: CoreSettings
    num_prompts: int
    num_generators: int
    num_engines: int
    num_slots: int
    publish_every: int
    prefetch: bool
    faults_until_s: float
    mean_fault_gap_s: float
    num_kept: int
    """checkpoints"""
    trainer_storm: bool
    """the trainer dies again and again, so that checkpoints of several lives lie about"""
    loss: float
    duplication: float
    mean_delay_s: float


def schedule_of(seed: int) -> Schedule:
    """The schedule of `seed`; equal seeds give equal runs."""
    rng = random.Random(f"schedule {seed}")
    per_step, depth = rng.randint(1, 3), rng.randint(0, 2)
    window = (depth + 1) * per_step
    order = rng.choice(list(DrawOrder))
    least = (window if order is DrawOrder.ticket else per_step) * GROUP_BYTES[1]
    calm = rng.random() < 0.1
    storm = not calm and rng.random() < 0.2
    settings = CoreSettings(
        groups_per_step=per_step,
        num_train_steps=rng.randint(6, 9) if storm else rng.randint(2, 5),
        max_staleness=depth + rng.randint(0, 2),
        pipeline_depth=depth,
        draw_order=order,
        on_stale=rng.choice(list(OnStale)),
        seed=seed,
        max_bytes=least if rng.random() < 0.5 else 10_000,
        max_groups=window + (per_step if rng.random() < 0.7 else 0),
        group_timeout_s=7.0,
        engines_per_cell=rng.randint(1, 2),
        remembered_tickets=rng.choice([3, 20_000, 20_000]),
    )
    schedule = Schedule(
        seed=seed,
        settings=settings,
        num_prompts=rng.randint(1, 7),
        num_generators=rng.randint(1, 3),
        num_engines=rng.randint(1, 2),
        num_slots=rng.randint(1, 3),
        publish_every=rng.randint(1, depth + 1),
        prefetch=rng.random() < 0.5,
        faults_until_s=_faults_until_s(rng, calm=calm, storm=storm),
        mean_fault_gap_s=rng.uniform(4.0, 8.0) if storm else rng.uniform(0.7, 5.0),
        num_kept=rng.choice([2, 5]),
        trainer_storm=storm,
        loss=rng.choice([0.0, 0.03, 0.15]),
        duplication=rng.choice([0.0, 0.03, 0.15]),
        mean_delay_s=rng.choice([0.01, 0.1, 0.5]),
    )
    return _with_depths(_with_age_rules(schedule))


def _with_age_rules(schedule: Schedule) -> Schedule:
    """What becomes of old tokens: from a stream of its own, so that the rest stays as it was."""
    rng = random.Random(f"ages {schedule.seed}")
    settings = schedule.settings
    changes: dict[str, Any] = {"keep_weight_cap": rng.choice([None, 3.0])}
    kind = rng.choice(["reject", "reject", "mask", "forced"])
    if kind == "mask":
        changes["over_age"] = OverAge.mask_tokens
        changes["min_fresh_fraction"] = rng.choice([0.01, 0.5, 1.0])
    elif kind == "forced":
        changes["forced"], changes["draw_order"] = True, DrawOrder.oldest_version
        changes["max_bytes"] = max(settings.max_bytes, settings.window * GROUP_BYTES[1])
    return replace(
        schedule,
        settings=replace(settings, **changes),
        publish_every=1 if kind == "forced" else schedule.publish_every,
    )


def _with_depths(schedule: Schedule) -> Schedule:
    """Which pipeline_depth the trainer may ask for; also from a stream of its own."""
    rng, settings = random.Random(f"depths {schedule.seed}"), schedule.settings
    least = settings.pipeline_depth if settings.forced else schedule.publish_every - 1
    if settings.forced or rng.random() < 0.5:
        return replace(schedule, settings=replace(settings, min_depth=least))
    settings = replace(settings, min_depth=least, max_depth=settings.max_staleness)
    more = settings.window - (settings.pipeline_depth + 1) * settings.groups_per_step
    needed = settings.window if settings.draw_order is DrawOrder.ticket else 0
    settings = replace(
        settings,
        max_groups=settings.max_groups + more,
        max_bytes=max(settings.max_bytes, needed * GROUP_BYTES[1]),
    )
    return replace(schedule, settings=settings)


def _faults_until_s(rng: random.Random, *, calm: bool, storm: bool) -> float:
    if storm:
        return rng.uniform(40.0, 60.0)
    return 0.0 if calm else rng.uniform(3.0, 20.0)
