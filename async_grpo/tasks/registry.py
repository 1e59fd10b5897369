"""Tasks by name, from this package or out of tree."""

import inspect

from async_grpo.config.load import resolve_object
from async_grpo.config.task import TaskSection
from async_grpo.errors import ConfigError
from async_grpo.interfaces import Reward, Task

BUILT_IN = {
    "reverse": "async_grpo.tasks.reverse:ReverseTask",
    "arithmetic": "async_grpo.tasks.arithmetic:ArithmeticTask",
    "jsonl": "async_grpo.tasks.jsonl:JsonlTask",
}


def make_task(section: TaskSection, seed: int) -> Task:
    """The task that `section` names, made as `factory(seed=seed, **options)`.

    Raises:
        ConfigError: no such task, or it refuses its options.
    """
    reference = BUILT_IN.get(section.name, section.name)
    if ":" not in reference:
        raise ConfigError(
            f"task.name: no task {section.name!r}; known are {', '.join(sorted(BUILT_IN))} and "
            "package.module:attribute"
        )
    factory = resolve_object(reference, "task.name")
    options = {str(name): value for name, value in section.options.items()}
    try:
        inspect.signature(factory).bind(seed=seed, **options)
    except TypeError as error:
        raise ConfigError(f"task.options of {section.name}: {error}") from error
    try:
        task: Task = factory(seed=seed, **options)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.options of {section.name}: {error}") from error
    if len(task) < 1:
        raise ConfigError(f"task.name: {section.name} has no prompts")
    return task


def make_reward(section: TaskSection, task: Task) -> Reward:
    """The reward that `task.reward` names, else the task's own.

    Raises:
        ConfigError: it cannot be imported or is not callable.
    """
    if not section.reward:
        return task.reward
    reward = resolve_object(section.reward, "task.reward")
    if not callable(reward):
        raise ConfigError(f"task.reward: {section.reward} is not callable")
    found: Reward = reward
    return found
