"""Rules across sections: what deadlocks is refused, what is unwise is warned of."""

from collections.abc import Iterator
from dataclasses import fields

from async_grpo.config.alarms import AlarmAction
from async_grpo.config.algorithm import Aggregation
from async_grpo.config.devices import card_problems, card_warnings
from async_grpo.config.engine import EngineKind, EngineSection
from async_grpo.config.limits import time_warnings
from async_grpo.config.objective import objective_warnings
from async_grpo.config.schema import Config
from async_grpo.config.staleness import DrawOrder, OverAge, StalenessSection

BYTES_PER_TOKEN = 8
"""Wire size of one token: int32 id and float32 log-prob."""


def all_problems(config: Config) -> list[str]:
    """Every reason to refuse `config`, each naming its field."""
    found: list[str] = []
    for section in fields(config):
        checker = getattr(getattr(config, section.name), "problems", None)
        if checker is not None:
            found += checker(section.name)
    found += _cross_section(config)
    return found


def resolve_length_limit(config: Config) -> None:
    """Set `algorithm.length_limit`, where it is read and null, to the longest completion."""
    algorithm = config.algorithm
    read = algorithm.overlong_buffer_tokens > 0 or algorithm.aggregation is Aggregation.constant
    if read and algorithm.length_limit is None:
        algorithm.length_limit = config.generation.max_new_tokens


def group_bytes_bound(config: Config, prompt_tokens: int = 0) -> int:
    """Largest payload of one group: all completions at full length, prompts of `prompt_tokens`."""
    generation = config.generation
    per_sequence = BYTES_PER_TOKEN * generation.max_new_tokens + 4 * prompt_tokens
    return generation.group_size * per_sequence


def max_groups(config: Config) -> int:
    """Resolved `replay.max_groups`."""
    window = (config.staleness.deepest + 1) * config.replay.groups_per_step
    return config.replay.max_groups or window + config.replay.groups_per_step


def least_depth(config: Config) -> int:
    """Smallest pipeline_depth that does not deadlock: see the rule for weights.publish_every."""
    return config.weights.publish_every - 1


def _cross_section(config: Config) -> Iterator[str]:
    depth = config.staleness.depth
    per_step = config.replay.groups_per_step
    if config.weights.publish_every > depth + 1:
        yield (
            f"weights.publish_every ({config.weights.publish_every}) must be <= "
            f"staleness.pipeline_depth + 1 ({depth + 1}), or the trainer waits for groups that "
            "only the next publish would admit"
        )
    yield from _idle_shrinking(config)
    if config.staleness.force is not None and config.weights.publish_every != 1:
        yield (
            f"weights.publish_every ({config.weights.publish_every}) must be 1 with "
            "staleness.force: each step's groups are sampled by weights of their own"
        )
    window = (config.staleness.deepest + 1) * per_step
    needed_groups, because = per_step, "groups_per_step"
    if config.staleness.force is not None:
        needed_groups, because = window, "(force + 1) * groups_per_step"
    elif config.staleness.draw_order is DrawOrder.ticket:
        needed_groups = window
        because = "(pipeline_depth + 1) * groups_per_step with draw_order=ticket"
    largest = group_bytes_bound(config)
    if config.replay.max_bytes < needed_groups * largest:
        yield (
            f"replay.max_bytes ({config.replay.max_bytes}) must hold {needed_groups} groups "
            f"({because}) of up to {largest} bytes: at least {needed_groups * largest}"
        )
    if config.replay.max_groups and config.replay.max_groups < needed_groups:
        yield (
            f"replay.max_groups ({config.replay.max_groups}) must be at least {needed_groups} "
            f"({because})"
        )
    if config.replay.max_group_bytes < largest:
        yield (
            f"replay.max_group_bytes ({config.replay.max_group_bytes}) is below the {largest} "
            "bytes of a group of generation.group_size completions of generation.max_new_tokens"
        )
    if config.trainer.updates_per_step > per_step:
        yield (
            f"trainer.updates_per_step ({config.trainer.updates_per_step}) must be <= "
            f"replay.groups_per_step ({per_step})"
        )
    context, budget = config.engine.context_length, config.generation.max_new_tokens
    if context and budget >= context:
        yield (
            f"generation.max_new_tokens ({budget}) must be below engine.context_length "
            f"({context}): the prompt needs room too"
        )
    limit = config.algorithm.length_limit
    if limit is not None and config.algorithm.overlong_buffer_tokens > limit:
        yield (
            f"algorithm.overlong_buffer_tokens ({config.algorithm.overlong_buffer_tokens}) must be "
            f"<= algorithm.length_limit ({limit})"
        )
    if config.engine.device_ids and config.launch.num_generators > 1:
        yield (
            f"engine.device_ids with launch.num_generators ({config.launch.num_generators}): every "
            "generator would start its engines on the same devices; use one generator and "
            "engine.num_engines"
        )
    yield from card_problems(config)
    if config.engine.urls and config.launch.num_generators > 1:
        yield (
            f"engine.urls with launch.num_generators ({config.launch.num_generators}): every "
            "generator would attach to the same servers; one generator drives any number of them"
        )
    if config.generation.group_size < 2:
        yield "generation.group_size must be >= 2: a group of one has no advantage"


def _idle_shrinking(config: Config) -> Iterator[str]:
    """Alarms that are to shrink a depth which cannot shrink."""
    names = config.alarms.uses(AlarmAction.shrink_depth)
    if names and config.staleness.force is not None:
        yield f"alarms.{names[0]}_action=shrink_depth cannot move what staleness.force holds"
    elif names and config.staleness.deepest <= least_depth(config):
        yield (
            f"alarms.{names[0]}_action=shrink_depth has no effect: staleness.pipeline_depth is "
            f"weights.publish_every - 1 ({least_depth(config)}) already, the smallest"
        )


_OF_SGLANG = ("python", "model", "server_args")
_OF_STARTED = (*_OF_SGLANG, "num_engines", "tensor_parallel_size", "device_ids", "environment")


def _idle_engine_fields(engine: EngineSection) -> Iterator[str]:
    defaults = EngineSection()
    changed = {name for name in _OF_STARTED if getattr(engine, name) != getattr(defaults, name)}
    for name in sorted(changed):
        if engine.urls:
            yield f"engine.{name} has no effect with engine.urls: no engine is started"
        elif engine.kind == EngineKind.embedded and name in _OF_SGLANG:
            yield f"engine.{name} has no effect with engine.kind: embedded"


def warnings(config: Config) -> list[str]:
    """What works but is unwise or has no effect."""
    found = []
    bound, depth = config.staleness.max_staleness, config.staleness.depth
    section = config.staleness
    if 0 < bound < 2 * depth and section.force is None:
        found.append(
            f"staleness.max_staleness ({bound}) is below twice the pipeline_depth ({depth}): "
            "expect rejected groups and a bias to short completions"
        )
    masks = section.over_age is OverAge.mask_tokens
    if not masks and section.min_fresh_fraction != StalenessSection.min_fresh_fraction:
        found.append("staleness.min_fresh_fraction has no effect without over_age=mask_tokens")
    found += objective_warnings(
        config.algorithm,
        updates_per_step=config.trainer.updates_per_step,
        max_staleness=bound,
    )
    if config.task.name == "jsonl" and config.task.chat_template and not config.task.reward:
        found.append(
            "task.reward is left to jsonl, whose own wants the whole completion to be the answer: "
            "a model that chats or reasons earns 0 with every one, and then no group has a signal; "
            "for instance task.reward=async_grpo.tasks.rewards:boxed_answer"
        )
    found += _idle_engine_fields(config.engine)
    found += card_warnings(config)
    found += time_warnings(config)
    patience_s, start_s = config.run.no_progress_timeout_s, config.engine.start_timeout_s
    starts_sglang = config.engine.kind == EngineKind.sglang and not config.engine.urls
    if starts_sglang and patience_s <= start_s:
        found.append(
            f"run.no_progress_timeout_s ({patience_s:g}) is not above engine.start_timeout_s "
            f"({start_s:g}): the run may end while its engines still load"
        )
    if not config.policy.maker and config.policy.maker_options:
        found.append("policy.maker_options has no effect without policy.maker")
    return found
