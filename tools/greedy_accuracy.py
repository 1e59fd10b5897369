"""Accuracy on held-out prompts before and after a run: `greedy_accuracy.py CONFIG [key=value ...]`.

Greedy and sampled (temperature 1) accuracy of `policy.model` and of the run directory's final
model, by the library's own generate and the task's own reward. Held out: made with another seed,
and not among the prompts that the run could draw.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from async_grpo.config.load import load_config
from async_grpo.config.run_directory import RunDirectory
from async_grpo.config.schema import Config
from async_grpo.interfaces import Reward
from async_grpo.tasks.prompts import PromptSource
from async_grpo.tasks.registry import make_reward, make_task
from async_grpo.tasks.tokenizer import load_tokenizer
from async_grpo.training.toy import sample_completions
from async_grpo.types import Prompt

_OTHER_SEED = 7919


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    final = RunDirectory(Path(config.run.output_dir)).final_model
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no annotation
    torch.set_num_threads(config.trainer.threads)
    prompts = held_out_prompts(config, args.num_prompts)
    print(f"accuracy on {len(prompts)} held-out prompts of task {config.task.name}")
    print(f"{'model':<10}{'greedy':>8}{'sampled':>9}")
    for label, model in (("initial", config.policy.model), ("final", str(final))):
        greedy, sampled = measure(config, model, prompts, args.batch_size)
        print(f"{label:<10}{greedy:>8.3f}{sampled:>9.3f}")
    return 0


def held_out_prompts(config: Config, num_prompts: int) -> list[Prompt]:
    """Prompts that no train step of the run can have seen."""
    trained = make_task(config.task, config.run.seed)
    seen = {trained.question(index)[0] for index in range(len(trained))}
    task = make_task(config.task, config.run.seed + _OTHER_SEED)
    if task.fingerprint() == trained.fingerprint():
        raise SystemExit(f"task {config.task.name} does not depend on a seed: nothing is held out")
    source = PromptSource(
        task,
        load_tokenizer(config.policy.model),
        chat_template=config.task.chat_template,
        system_prompt=config.task.system_prompt,
    )
    unseen = [index for index in range(len(task)) if task.question(index)[0] not in seen]
    return [source.prompt(index) for index in unseen[:num_prompts]]


def measure(
    config: Config, model_name: str, prompts: list[Prompt], batch_size: int
) -> tuple[float, float]:
    """(greedy, sampled) share of prompts whose completion earns a reward of 1 or more."""
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=str(config.policy.dtype))
    reward = make_reward(config.task, make_task(config.task, config.run.seed))
    tokenizer = load_tokenizer(config.policy.model)
    end = tokenizer.eos_token_id
    if end is None:
        raise SystemExit(f"{config.policy.model}: the tokenizer has no EOS")
    torch.manual_seed(config.run.seed)
    num_right = {True: 0, False: 0}
    for greedy in num_right:
        for at in range(0, len(prompts), batch_size):
            batch = prompts[at : at + batch_size]
            completions = sample_completions(
                model,
                [prompt.token_ids for prompt in batch],
                max_new_tokens=config.generation.max_new_tokens,
                greedy=greedy,
                pad_token_id=end,
                eos_token_id=end,
            )
            texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
            num_right[greedy] += sum(
                is_right(reward, text, prompt) for text, prompt in zip(texts, batch, strict=True)
            )
    return num_right[True] / len(prompts), num_right[False] / len(prompts)


def is_right(reward: Reward, text: str, prompt: Prompt) -> bool:
    """The reward, or the sum of its parts, is 1 or more."""
    value = reward(text, prompt.answer, prompt.metadata)
    if isinstance(value, Mapping):
        value = sum(value.values())
    return value is not None and value >= 1.0


if __name__ == "__main__":
    sys.exit(main())
