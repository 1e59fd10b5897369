"""The few numbers of the configuration that the replay core decides by."""

from dataclasses import dataclass

from async_grpo.config.rules import least_depth, max_groups
from async_grpo.config.schema import Config
from async_grpo.config.staleness import DrawOrder, OnStale, OverAge


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Fixed for the life of a core; see the configuration's fields of the same names."""

    groups_per_step: int
    num_train_steps: int
    max_staleness: int
    pipeline_depth: int
    """at the start of the run; `State.pipeline_depth` is the one in force"""
    min_depth: int = 0
    """smallest that it may be set to"""
    max_depth: int | None = None
    """largest; None: pipeline_depth"""
    draw_order: DrawOrder = DrawOrder.oldest_version
    over_age: OverAge = OverAge.reject
    min_fresh_fraction: float = 0.5
    on_stale: OnStale = OnStale.drop
    keep_weight_cap: float | None = None
    forced: bool = False
    """train at staleness `pipeline_depth` exactly (`staleness.force`)"""
    seed: int = 0
    max_bytes: int = 1 << 30
    max_groups: int
    max_group_bytes: int = 1 << 28
    credit_bytes: int = 1 << 28
    peer_timeout_s: float = 6.0
    group_timeout_s: float = 600.0
    max_lost_claims: int = 3
    engines_per_cell: int = 1
    eval_every: int = 0
    """0: no evaluation"""
    eval_num_prompts: int = 64
    remembered_tickets: int = 20_000
    """Ended tickets whose outcome is remembered; a message about an older one is fenced."""

    @property
    def deepest(self) -> int:
        """The largest pipeline_depth that may ever be in force."""
        return self.pipeline_depth if self.max_depth is None else self.max_depth

    @property
    def window(self) -> int:
        """Most groups that may be claimed, stored, leased or trained but not yet live, ever."""
        return (self.deepest + 1) * self.groups_per_step

    @classmethod
    def from_config(cls, config: Config) -> "CoreSettings":
        """The core's part of a checked configuration."""
        replay, staleness = config.replay, config.staleness
        return cls(
            groups_per_step=replay.groups_per_step,
            num_train_steps=config.run.num_train_steps,
            max_staleness=staleness.max_staleness,
            pipeline_depth=staleness.depth,
            min_depth=staleness.depth if staleness.force is not None else least_depth(config),
            max_depth=staleness.deepest,
            draw_order=staleness.order,
            over_age=staleness.over_age,
            min_fresh_fraction=staleness.min_fresh_fraction,
            on_stale=staleness.on_stale,
            keep_weight_cap=staleness.keep_weight_cap,
            forced=staleness.force is not None,
            seed=config.run.seed,
            max_bytes=replay.max_bytes,
            max_groups=max_groups(config),
            max_group_bytes=replay.max_group_bytes,
            credit_bytes=replay.credit_bytes,
            peer_timeout_s=replay.peer_timeout_s,
            group_timeout_s=config.generation.group_timeout_s,
            max_lost_claims=replay.max_lost_claims,
            engines_per_cell=config.weights.engines_per_cell,
            eval_every=config.eval.every,
            eval_num_prompts=config.eval.num_prompts,
        )
