"""Texts and token ids: whether tokenizer, policy, task and engine speak of the same ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from async_grpo.config.schema import Config
from async_grpo.doctor.report import Finding, fail, ok, skipped
from async_grpo.doctor.subject import Sample
from async_grpo.engine_api import ModelInfo, ServerInfo
from async_grpo.errors import ConfigError
from async_grpo.generation.vocabulary import policy_vocab_size
from async_grpo.roles.generator_start import Room
from async_grpo.tasks.held_out import split_task
from async_grpo.tasks.prompts import PromptSource
from async_grpo.tasks.registry import make_task
from async_grpo.tasks.tokenizer import FastTokenizer, load_tokenizer
from async_grpo.training.model import PolicyModel

_CHAT = [{"role": "user", "content": "What is 2 + 3?"}]
_ANSWER = {"role": "assistant", "content": "5"}
_NUM_PROMPTS = 4


@dataclass(frozen=True)
class Texts:
    """How the run makes prompts."""

    tokenizer: FastTokenizer
    prompts: PromptSource
    num_prompts: int
    room: Room


def check_tokenizer(config: Config, model: PolicyModel) -> tuple[Finding, FastTokenizer | None]:
    """Ids in range, an end that sampling stops at, and the ids that transformers makes."""
    check, name = "tokenizer", config.policy.model
    try:
        tokenizer = load_tokenizer(name)
    except ConfigError as error:
        return fail(check, str(error), "save the model's own fast tokenizer beside it"), None
    if tokenizer.vocab_size > model.vocab_size:
        return (
            fail(
                check,
                f"it makes ids up to {tokenizer.vocab_size - 1}, the policy knows "
                f"{model.vocab_size}",
                f"it is another model's: save the policy's own tokenizer in {name}",
            ),
            None,
        )
    ends = _end_ids(tokenizer, model)
    try:
        problem = _disagreement(tokenizer, config, ends)
    except ConfigError as error:
        problem = (str(error), "mend the template, or set task.chat_template=false")
    if problem:
        return fail(check, *problem), tokenizer
    figure = (
        f"{tokenizer.vocab_size} ids of the policy's {model.vocab_size}; completions end at "
        f"{', '.join(str(end) for end in sorted(ends))}; transformers makes the same ids"
    )
    return ok(check, figure, {"vocab_size": float(tokenizer.vocab_size)}), tokenizer


def _end_ids(tokenizer: FastTokenizer, model: PolicyModel) -> set[int]:
    """Where sampling stops: the tokenizer's end, sent with each request, and the model's."""
    module: Any = model.module
    found = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    for owner in (module.generation_config, module.config):
        value = getattr(owner, "eos_token_id", None)
        found.update(value if isinstance(value, list) else () if value is None else (value,))
    return found


def _disagreement(
    tokenizer: FastTokenizer, config: Config, ends: set[int]
) -> tuple[str, str] | None:
    """(what is wrong, what to do).

    Raises:
        ConfigError: there is no chat template, or it fails.
    """
    if not ends:
        return (
            "neither the tokenizer nor the model names an end token",
            "set eos_token in tokenizer_config.json: completions would never end by themselves",
        )
    theirs = AutoTokenizer.from_pretrained(config.policy.model)
    for special in (True, False):
        text = _CHAT[0]["content"]
        ids = theirs(text, add_special_tokens=special)["input_ids"]
        if list(ids) != tokenizer.encode(text, add_special_tokens=special):
            return (
                f"transformers makes other ids of {text!r} (add_special_tokens={special})",
                "report it with tokenizer.json and tokenizer_config.json",
            )
    if not config.task.chat_template:
        return None
    ours = tokenizer.apply_chat_template(_CHAT, add_generation_prompt=True)
    if ours != theirs.apply_chat_template(_CHAT, tokenize=False, add_generation_prompt=True):
        return (
            "transformers makes another text of the chat template",
            "report it with the template; or set task.chat_template=false",
        )
    asked = tokenizer.apply_chat_template(_CHAT, tokenize=True)
    answered = tokenizer.apply_chat_template([*_CHAT, _ANSWER], tokenize=True)
    if not ends & set(answered[len(asked) :]):
        return (
            "the chat template puts no token behind an answer at which sampling stops",
            "let generation_config.json or the tokenizer's eos_token name the template's end of "
            "a turn: completions would run on to max_new_tokens",
        )
    return None


def check_prompts(config: Config, tokenizer: FastTokenizer) -> tuple[Finding, Texts | None]:
    """That the task's prompts can be made, with exactly one BOS where the model has one."""
    try:
        task, seed = make_task(config.task, config.run.seed), config.run.seed
        train_task, held_out = split_task(task, config.eval, seed)
        prompts = PromptSource(
            train_task,
            tokenizer,
            held_out=held_out,
            chat_template=config.task.chat_template,
            system_prompt=config.task.system_prompt,
        )
        texts = Texts(tokenizer, prompts, len(train_task), Room(config, prompts))
    except ConfigError as error:
        return fail("prompts", str(error), "mend the task or its template"), None
    ids = prompts.prompt(0).token_ids
    figure = f"{len(task)} of them; the first has {len(ids)} tokens"
    if tokenizer.bos_token_id is not None:
        figure += f", {ids.count(tokenizer.bos_token_id)} of them BOS"
    return ok("prompts", figure, {"num_prompts": float(len(task))}), texts


def check_vocabulary(
    info: ServerInfo, model_info: ModelInfo, model: PolicyModel, texts: Texts | None
) -> Finding:
    """That the engine serves this policy's vocabulary, and has room for the task's prompts."""
    check, ours, theirs = "vocabulary", model.vocab_size, info.vocab_size
    directory = Path(model_info.model_path)
    if theirs is None and directory.is_dir():  # of an engine on this machine
        theirs = policy_vocab_size(model_info.model_path)
    if theirs is not None and theirs != ours:
        return fail(
            check,
            f"the engine's model {model_info.model_path} has {theirs} ids, the policy {ours}",
            "start the engine with policy.model, or name another one in engine.urls",
        )
    if texts is not None:
        try:
            texts.room.require(info.context_length, "the engine's context")
        except ConfigError as error:
            return fail(check, str(error), "start the engine with a longer context")
    known = "does not tell its vocabulary" if theirs is None else f"knows {theirs} ids"
    return ok(check, f"the engine {known}, context {info.context_length or 'unknown'}")


def check_text(samples: list[Sample], tokenizer: FastTokenizer | None) -> Finding:
    """That the engine's own text of a completion is the tokenizer's."""
    check = "text"
    if tokenizer is None:
        return skipped(check, "no tokenizer to compare with")
    told = [sample for sample in samples if sample.reply.text]
    if not told:
        return skipped(check, "the engine returns ids only; nothing of it uses texts")
    for sample in told:
        text = tokenizer.decode(sample.part.token_ids, skip_special_tokens=True)
        # where it stops inside a character, each side writes the rest as it likes
        if text.rstrip("\ufffd ").lstrip() != sample.reply.text.rstrip("\ufffd ").lstrip():
            return fail(
                check,
                f"the engine reads {sample.part.token_ids[:8]} as {sample.reply.text[:40]!r}, the "
                f"policy's tokenizer as {text[:40]!r}",
                "start the engine with the tokenizer of policy.model",
            )
    return ok(check, f"the engine and the tokenizer read {len(told)} completions alike")


def trial_prompts(texts: Texts | None, model: PolicyModel, *, seed: int) -> list[list[int]]:
    """A few prompts: the task's, or random ids where it has none that the policy can read."""
    if texts is not None:
        count = min(_NUM_PROMPTS, texts.num_prompts)
        return [list(texts.prompts.prompt(index).token_ids) for index in range(count)]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.vocab_size, (_NUM_PROMPTS, 8), generator=generator)
    return [[int(token) for token in row] for row in ids]
