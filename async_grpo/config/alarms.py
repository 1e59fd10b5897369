"""Section `alarms`: which figures of a train step are watched, and what happens when one is bad.

The table is data: alarm -> metric and side; its threshold is the field `{name}_min` or
`{name}_max`, its action `{name}_action`. No torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum

from async_grpo.config.ranges import positive


class AlarmAction(StrEnum):
    """What an alarm does."""

    warn = "warn"
    stop = "stop"
    shrink_depth = "shrink_depth"
    scale_lr = "scale_lr"


@dataclass(frozen=True, slots=True)
class AlarmKind:
    """One alarm that can be set."""

    name: str
    metric: str
    is_floor: bool
    """the threshold is the smallest good value; else the largest"""
    advice: str
    """what to look at or change, for the log"""
    at_once: float | None = None
    """a single step beyond so many times the threshold raises it"""

    @property
    def threshold_field(self) -> str:
        """Of the section."""
        return f"{self.name}_{'min' if self.is_floor else 'max'}"


KINDS = (
    AlarmKind(
        "ess", "ess/raw", True,
        "a few tokens carry the batch: lower staleness.pipeline_depth or trainer.lr; if "
        "logprob/lag0_ess is low too, engine and trainer differ",
    ),
    AlarmKind(
        "lag0_gap", "logprob/lag0_gap", False,
        "engine and trainer disagree about the same weights: dtype, kernels or sampling parameters",
        at_once=3.0,  # an asynchronous run measures it in its first step, and then seldom
    ),
    AlarmKind(
        "k3", "kl/behavior_k3", False,
        "the policy runs away from the one that sampled: lower trainer.lr or "
        "staleness.pipeline_depth",
    ),
    AlarmKind(
        "clip_fraction", "clip/fraction", False,
        "clipped tokens have no gradient: fewer updates per step, a lower trainer.lr, or "
        "algorithm.anchor=proximal",
    ),
    AlarmKind(
        "masked_fraction", "excluded_fraction", False,
        "sampled tokens are thrown away by age or by masks: see rejected/* and kl/behavior_k3",
    ),
    AlarmKind(
        "zero_variance", "zero_variance_fraction", False,
        "groups of equal rewards teach nothing: the prompts are too easy or too hard for this "
        "policy",
    ),
    AlarmKind(
        "length_ratio", "selection/length_ratio", True,
        "long completions grow stale before they are trained: raise staleness.max_staleness, lower "
        "staleness.pipeline_depth, or set staleness.keep_weight_cap",
    ),
    AlarmKind(
        "entropy", "entropy", True,
        "the policy hardly explores any more: set algorithm.entropy_coef, raise "
        "algorithm.clip_high or generation.temperature",
    ),
    AlarmKind(
        "truncated", "completion/truncated_fraction", False,
        "completions end by generation.max_new_tokens: raise it, or penalize length "
        "(algorithm.overlong_buffer_tokens)",
    ),
)  # fmt: skip


@dataclass(kw_only=True)
class AlarmsSection:
    """Figures of each train step that are watched (docs/alarms.md).

    A threshold of null switches its alarm off. Actions: warn; stop (checkpoint, then exit code 4);
    shrink_depth (pipeline_depth - 1, again while it lasts); scale_lr (lr_factor while it lasts).
    """

    ess_min: float | None = 0.3
    """Effective sample size of raw token weights, as a fraction (verl warns below 0.3)."""
    ess_action: AlarmAction = AlarmAction.warn
    """warn, stop, shrink_depth or scale_lr."""
    lag0_gap_max: float | None = 0.05
    """Mean |log-prob difference| of engine and trainer on tokens of the very same weights, nats
    (Ring-1T calls 5 % of relative probability failing). 2.5 times the trainer's own rounding
    counts instead where that is more. One step beyond three times this raises the alarm at once."""
    lag0_gap_action: AlarmAction = AlarmAction.warn
    """As above."""
    k3_max: float | None = 0.1
    """KL(behavior, proximal) per token by k3, nats (verl warns at |k1| > 0.1)."""
    k3_action: AlarmAction = AlarmAction.warn
    """As above."""
    clip_fraction_max: float | None = 0.3
    """Share of trained tokens on which any clip is active."""
    clip_fraction_action: AlarmAction = AlarmAction.warn
    """As above."""
    masked_fraction_max: float | None = 0.1
    """Share of sampled tokens of trained groups that age or masks keep out of the loss."""
    masked_fraction_action: AlarmAction = AlarmAction.warn
    """As above."""
    zero_variance_max: float | None = 0.5
    """Share of groups whose rewards are all equal (DAPO: half of the work is wasted)."""
    zero_variance_action: AlarmAction = AlarmAction.warn
    """As above."""
    length_ratio_min: float | None = 0.95
    """Mean length trained / generated, over the last 20 steps and without no_signal groups."""
    length_ratio_action: AlarmAction = AlarmAction.warn
    """As above."""
    entropy_min: float | None = 0.01
    """Mean entropy per token, nats."""
    entropy_action: AlarmAction = AlarmAction.warn
    """As above."""
    truncated_max: float | None = 0.5
    """Share of completions cut by their length."""
    truncated_action: AlarmAction = AlarmAction.warn
    """As above."""
    patience: int = 5
    """Steps in a row beyond its threshold that raise an alarm, and as many clearly within it (by a
    tenth) that end it."""
    lr_factor: float = 0.5
    """scale_lr: the learning rate is multiplied by this while any such alarm lasts."""

    def threshold(self, kind: AlarmKind) -> float | None:
        """Of one alarm; None: it is off."""
        value: float | None = getattr(self, kind.threshold_field)
        return value

    def action(self, kind: AlarmKind) -> AlarmAction:
        """Of one alarm."""
        chosen: AlarmAction = getattr(self, f"{kind.name}_action")
        return chosen

    def uses(self, action: AlarmAction) -> list[str]:
        """Names of the alarms that are on and have this action."""
        return [
            kind.name
            for kind in KINDS
            if self.threshold(kind) is not None and self.action(kind) is action
        ]

    def problems(self, where: str) -> Iterator[str]:
        """Every complaint about this section."""
        yield from positive(where, self, "patience")
        set_ones = [kind.threshold_field for kind in KINDS if self.threshold(kind) is not None]
        yield from positive(where, self, *set_ones)
        for kind in KINDS:
            if self.threshold(kind) is None and self.action(kind) is not AlarmAction.warn:
                yield (
                    f"{where}.{kind.name}_action has no effect with "
                    f"{where}.{kind.threshold_field}=null"
                )
        if not 0 < self.lr_factor < 1:
            yield f"{where}.lr_factor must be between 0 and 1, got {self.lr_factor}"
        default = {field.name: field.default for field in fields(self)}["lr_factor"]
        if self.lr_factor != default and not self.uses(AlarmAction.scale_lr):
            yield f"{where}.lr_factor has no effect: no alarm has the action scale_lr"
