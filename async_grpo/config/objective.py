"""Which parts of an objective combine. No torch.

The tables are data: which knobs a choice reads (a knob that nothing reads is refused, never
ignored), and which ratio levels a surrogate is defined for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from async_grpo.config.presets import PRESETS
from async_grpo.config.ranges import not_negative, positive

if TYPE_CHECKING:
    from async_grpo.config.algorithm import AlgorithmSection

ADVANTAGE_KNOBS: Mapping[str, frozenset[str]] = {
    "grpo": frozenset(
        {"advantage_eps", "advantage_eps_placement", "advantage_std", "advantage_min_std"}
    ),
    "mean_only": frozenset(),
    "rloo": frozenset(),
    "opo": frozenset(),
    "maxrl": frozenset(),
    "batch_std": frozenset({"advantage_eps", "advantage_std"}),
    "reinforce_pp": frozenset({"advantage_eps", "advantage_std"}),
}
"""built-in advantage -> fields that it reads"""

SURROGATE_KNOBS: Mapping[str, frozenset[str]] = {
    "ppo": frozenset({"clip_low", "clip_high", "dual_clip"}),
    "gmpo": frozenset({"gmpo_log_clip"}),
    "cispo": frozenset({"ratio_floor", "ratio_cap"}),
    "ratio": frozenset({"ratio_cap"}),
    "sapo": frozenset({"sapo_tau_positive", "sapo_tau_negative"}),
    "reinforce": frozenset(),
    "dppo": frozenset({"dppo_delta_low", "dppo_delta_high", "ratio_cap"}),
    "topr": frozenset({"topr_low", "topr_high"}),
    "aspo": frozenset({"ratio_cap"}),
}
"""built-in surrogate -> fields that it reads"""

_ALL_LEVELS = frozenset({"token", "sequence", "geometric"})
SURROGATE_LEVELS: Mapping[str, frozenset[str]] = {
    "ppo": _ALL_LEVELS,
    "gmpo": frozenset({"token"}),  # it takes the geometric mean by itself, after its clip
    "cispo": _ALL_LEVELS,
    "ratio": _ALL_LEVELS,
    "sapo": _ALL_LEVELS,
    "reinforce": frozenset({"token"}),  # it has no ratio
    "dppo": frozenset({"token"}),  # it compares probabilities of single tokens
    "topr": frozenset({"sequence"}),
    "aspo": frozenset({"token"}),
}
"""built-in surrogate -> ratio levels that it is defined for"""

_POSITIVE = (
    "clip_high", "behavior_weight_cap", "ratio_cap", "gmpo_log_clip", "sapo_tau_positive",
    "sapo_tau_negative", "dppo_delta_low", "dppo_delta_high", "topr_high", "kl_ratio_cap",
)  # fmt: skip
_NOT_NEGATIVE = (
    "kl_coef", "entropy_coef", "advantage_eps", "advantage_min_std", "overlong_buffer_tokens",
    "ratio_floor", "behavior_weight_floor", "topr_low",
)  # fmt: skip
_OPTIONAL_POSITIVE = (
    "length_limit", "reject_token_low", "reject_token_high", "reject_sequence_low",
    "reject_sequence_high", "reject_veto", "reject_opsm", "reject_m2",
)  # fmt: skip
_BEHAVIOR_WEIGHT_KNOBS = ("behavior_weight_level", "behavior_weight_floor", "behavior_weight_cap")
_BOUNDS = (
    ("ratio_floor", "ratio_cap"), ("behavior_weight_floor", "behavior_weight_cap"),
    ("topr_low", "topr_high"), ("reject_token_low", "reject_token_high"),
    ("reject_sequence_low", "reject_sequence_high"),
)  # fmt: skip


def objective_problems(section: "AlgorithmSection", where: str) -> Iterator[str]:
    """Why the section is refused: values out of range, knobs without effect, parts that clash."""
    yield from positive(where, section, *_POSITIVE)
    yield from not_negative(where, section, *_NOT_NEGATIVE)
    set_ones = [name for name in _OPTIONAL_POSITIVE if getattr(section, name) is not None]
    yield from positive(where, section, *set_ones)
    if not 0 < section.clip_low < 1:
        yield f"{where}.clip_low must be between 0 and 1, got {section.clip_low}"
    if section.dual_clip is not None and section.dual_clip <= 1 + section.clip_high:
        yield f"{where}.dual_clip must exceed 1 + clip_high, got {section.dual_clip}"
    for low, high in _BOUNDS:
        lower, upper = getattr(section, low), getattr(section, high)
        if lower is not None and upper is not None and lower >= upper:
            yield f"{where}.{low} ({lower}) must be below {where}.{high} ({upper})"
    for name, built_in in (("advantage", ADVANTAGE_KNOBS), ("surrogate", SURROGATE_KNOBS)):
        value = getattr(section, name)
        if value not in built_in and ":" not in value:
            yield (
                f"{where}.{name} must be one of {', '.join(built_in)} or "
                f"package.module:attribute, got {value!r}"
            )
    for reference in section.reject_custom:
        if ":" not in reference:
            yield f"{where}.reject_custom must name package.module:attribute, got {reference!r}"
    yield from _clashes(section, where)
    yield from _without_effect(section, where)


def _clashes(section: "AlgorithmSection", where: str) -> Iterator[str]:
    levels = SURROGATE_LEVELS.get(section.surrogate, _ALL_LEVELS)
    if section.ratio_level not in levels:
        yield (
            f"{where}.ratio_level={section.ratio_level} has no meaning with surrogate="
            f"{section.surrogate}, which is defined for: {', '.join(sorted(levels))}"
        )
    if section.surrogate == "reinforce" and section.anchor == "behavior":
        yield f"{where}.anchor has no effect with surrogate=reinforce: it has no ratio"
    elif section.anchor == "behavior" and section.behavior_weight != "none":
        yield (
            f"{where}.behavior_weight={section.behavior_weight} with anchor=behavior corrects "
            "twice: the importance ratio is already against the behavior policy; set "
            "behavior_weight=none"
        )
    if section.proximal == "interpolate":
        yield from _interpolation_clashes(section, where)
    sequence_bounds = (section.reject_sequence_low, section.reject_sequence_high)
    if section.reject_sequence_level == "token" and sequence_bounds != (None, None):
        yield f"{where}.reject_sequence_level must be sequence or geometric; see reject_token_*"
    if section.kl_coef:
        yield from _kl_clashes(section, where)


def _kl_clashes(section: "AlgorithmSection", where: str) -> Iterator[str]:
    estimator, correction = section.kl_estimator, section.kl_correction
    if estimator == "k1" and correction != "through":
        yield (
            f"{where}.kl_estimator=k1 in the loss has an expected gradient of 0, not that of a "
            "KL; use k2, k3, or kl_correction=through"
        )
    if estimator == "k2" and correction == "through":
        yield (
            f"{where}.kl_estimator=k2 with kl_correction=through has not the gradient of a KL; "
            "use kl_correction=detached, or k3"
        )


def _interpolation_clashes(section: "AlgorithmSection", where: str) -> Iterator[str]:
    if section.anchor == "behavior" and not _rejects(section):
        yield f"{where}.proximal=interpolate has no effect: nothing uses the proximal policy"
    if needs_whole_batch(section):
        yield (
            f"{where}.proximal=interpolate saves the pass over the batch that reject_m2, "
            "reject_custom and denominator=kept need; use auto or recompute"
        )


def _without_effect(section: "AlgorithmSection", where: str) -> Iterator[str]:
    """Fields of the user's that nothing reads."""
    defaults = {field.name: field.default for field in fields(section)}
    of_preset = PRESETS[section.preset]
    for name, reason in sorted(_idle(section).items()):
        # a preset's own value may lie idle: the user replaced what read it
        if getattr(section, name) not in (defaults[name], of_preset.get(name, defaults[name])):
            yield f"{where}.{name} has no effect with {reason}"


def _idle(section: "AlgorithmSection") -> dict[str, str]:
    """Fields that nothing reads, and why."""
    idle: dict[str, str] = {}
    for choice, table in (("advantage", ADVANTAGE_KNOBS), ("surrogate", SURROGATE_KNOBS)):
        value = getattr(section, choice)
        unread = frozenset().union(*table.values()) - table.get(value, frozenset())
        idle |= dict.fromkeys(unread, f"{choice}={value}")
    no_sequence_bound = section.reject_sequence_low is None and section.reject_sequence_high is None
    no_limit = not section.overlong_buffer_tokens and section.aggregation != "constant"
    unused_kl_cap = section.kl_correction != "detached"
    for is_idle, reason, names in (
        (section.behavior_weight == "none", "behavior_weight=none", _BEHAVIOR_WEIGHT_KNOBS),
        (no_sequence_bound, "no bound for sequences", ("reject_sequence_level",)),
        (section.reject_m2 is None, "reject_m2=null", ("reject_m2_tokens",)),
        (not _rejects(section), "nothing rejected", ("denominator",)),
        (unused_kl_cap, f"kl_correction={section.kl_correction}", ("kl_ratio_cap",)),
        (not section.kl_coef, "kl_coef=0", ("kl_estimator", "kl_correction", "kl_ratio_cap")),
        (
            section.proximal != "interpolate",
            f"proximal={section.proximal}",
            ("proximal_interpolation",),
        ),
        (no_limit, "neither overlong_buffer_tokens nor aggregation=constant", ("length_limit",)),
    ):
        if is_idle:
            idle |= dict.fromkeys(names, reason)
    return idle


def _rejects(section: "AlgorithmSection") -> bool:
    """Whether any token can be rejected."""
    optional = [name for name in _OPTIONAL_POSITIVE if name.startswith("reject_")]
    return (
        any(getattr(section, name) is not None for name in optional)
        or bool(section.reject_custom)
        or section.overlong_mask
        or section.behavior_weight == "mask"
    )


def needs_whole_batch(section: "AlgorithmSection") -> bool:
    """Whether tokens can only be rejected once the log-probs of the whole batch are known."""
    return (
        section.reject_m2 is not None
        or bool(section.reject_custom)
        or section.denominator == "kept"
    )


def objective_warnings(
    section: "AlgorithmSection", *, updates_per_step: int, max_staleness: int
) -> Iterator[str]:
    """What works but is unwise or does nothing in this run."""
    if section.proximal == "recompute" and updates_per_step == 1:
        yield "algorithm.proximal=recompute costs a pass for what one update per step has anyway"
    corrected = (
        section.behavior_weight != "none"
        or (section.anchor == "behavior" and section.surrogate != "reinforce")
        or _rejects(section)
    )
    if max_staleness and not corrected:
        yield (
            "algorithm corrects for nothing (behavior_weight=none, no ratio against the behavior "
            f"policy, no mask), and tokens may be {max_staleness} train steps stale"
        )
    if section.kl_coef and section.kl_correction == "none" and max_staleness:
        yield (
            "algorithm.kl_correction=none is right on policy only, and tokens may be "
            f"{max_staleness} train steps stale; kl_correction=through is exact"
        )
