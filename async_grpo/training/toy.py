"""A policy small enough for a CPU: a character-level Qwen3, warmed up by supervised steps.

Reinforcement needs some reward to begin with, and the warm-up has a sharp threshold below which
there is none; so it goes on until the *sampled* accuracy on held-out prompts reaches a gate, not
for a number of steps. What was measured is saved beside the model, in toy.json. Knows nothing of
how the policy is trained afterwards.
"""

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

from async_grpo.errors import AsyncGrpoError, ConfigError

logger = logging.getLogger(__name__)

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHARACTERS = "0123456789+-*=abcdefghijklmnopqrstuvwxyz >?:.,\n"
NOTE = "toy.json"


@dataclass(frozen=True, kw_only=True)
class ToyOptions:
    """`policy.maker_options` of the toy model."""

    length: int = 6
    """Letters to reverse; as the task's option."""
    alphabet: str = "abcdefgh"
    """As the task's option."""
    gate: float = 0.08
    """Sampled accuracy at which the warm-up ends."""
    max_steps: int = 300
    """Supervised steps after which the warm-up is given up."""
    batch_size: int = 128
    lr: float = 1e-3
    hidden_size: int = 96
    num_layers: int = 2
    intermediate_size: int = 256
    num_held_out: int = 256
    """Prompts of a measurement, each sampled four times."""


def make_toy_model(directory: Path, seed: int, options: Mapping[str, Any]) -> None:
    """Make, warm up and save a policy as a Hugging Face directory.

    Raises:
        ConfigError: an unknown option, or a letter that the tokenizer does not know.
        AsyncGrpoError: the gate was not reached within `max_steps`.
    """
    settings = _settings(options)
    torch.manual_seed(seed)
    tokenizer = make_toy_tokenizer()
    model = _new_model(tokenizer, settings)
    rng = random.Random(seed)
    held_out = sorted({_letters(rng, settings) for _ in range(settings.num_held_out)})
    measured = _warm_up(model, tokenizer, settings, rng, held_out)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    note = {"seed": seed, "options": asdict(settings), **measured}
    (directory / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    logger.info("warm-up: %s", note)


def make_toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a normal encode begins with exactly one BOS."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # untyped upstream
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS
    )


def sample_completions(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    greedy: bool,
    pad_token_id: int,
    eos_token_id: int,
) -> list[list[int]]:
    """One completion of each prompt, by the library's own generate; EOS and padding cut off.

    Args:
        model: a causal language model; its mode is not changed.
        prompts: token ids; padded on the left here.
        max_new_tokens: budget of each completion.
        greedy: take the likeliest token, or else sample at temperature 1 from the full
            distribution, with torch's global generator.
        pad_token_id: any id; it is masked.
        eos_token_id: ends a completion.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    settings = GenerationConfig(  # type: ignore[no-untyped-call]  # untyped upstream
        max_new_tokens=max_new_tokens,
        do_sample=not greedy,
        temperature=None if greedy else 1.0,
        top_k=None if greedy else 0,
        top_p=None if greedy else 1.0,
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
    )
    with torch.no_grad():
        output = cast(Any, model).generate(ids, attention_mask=mask, generation_config=settings)
    return [_until(row, eos_token_id) for row in output[:, width:].tolist()]


def _until(token_ids: list[int], end: int) -> list[int]:
    return token_ids[: token_ids.index(end)] if end in token_ids else token_ids


def _settings(options: Mapping[str, Any]) -> ToyOptions:
    known = {field.name for field in fields(ToyOptions)}
    if unknown := sorted(set(options) - known):
        raise ConfigError([f"policy.maker_options.{name} is not an option" for name in unknown])
    settings = ToyOptions(**options)
    if strange := sorted(set(settings.alphabet) - set(CHARACTERS)):
        raise ConfigError(f"policy.maker_options.alphabet: the toy tokenizer lacks {strange}")
    return settings


def _new_model(tokenizer: PreTrainedTokenizerFast, settings: ToyOptions) -> Qwen3ForCausalLM:
    num_heads = 4
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=settings.hidden_size // num_heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=_id_of(tokenizer, BOS),
        eos_token_id=_id_of(tokenizer, EOS),
        pad_token_id=_id_of(tokenizer, PAD),
    )
    return Qwen3ForCausalLM(config)


def _id_of(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return cast(int, tokenizer.convert_tokens_to_ids(token))


def _letters(rng: random.Random, settings: ToyOptions) -> str:
    return "".join(rng.choice(settings.alphabet) for _ in range(settings.length))


def _warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: ToyOptions,
    rng: random.Random,
    held_out: list[str],
) -> dict[str, float]:
    """Supervised steps until the gate; returns what was measured at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    examples = _examples(rng, settings, set(held_out))
    for step in range(1, settings.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / 20)
        batch = [next(examples) for _ in range(settings.batch_size)]
        loss = _supervised_loss(model, tokenizer, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step < 40 or step % 2:
            continue
        sampled = _accuracy(model, tokenizer, held_out * 4, greedy=False)
        if sampled >= settings.gate:
            greedy = _accuracy(model, tokenizer, held_out, greedy=True)
            return {"steps": step, "sampled_accuracy": sampled, "greedy_accuracy": greedy}
    raise AsyncGrpoError(
        f"the toy model's sampled accuracy did not reach {settings.gate} within "
        f"{settings.max_steps} supervised steps (policy.maker_options: gate, max_steps)"
    )


def _examples(
    rng: random.Random, settings: ToyOptions, held_out: set[str]
) -> Iterator[tuple[str, str]]:
    while True:
        letters = _letters(rng, settings)
        if letters not in held_out:
            yield f"{letters}>", letters[::-1]


def _supervised_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, batch: list[tuple[str, str]]
) -> torch.Tensor:
    """Mean cross-entropy of the answers; all rows are equally long."""
    prompts = torch.tensor([tokenizer.encode(text) for text, _ in batch])
    answers = torch.tensor(
        [
            [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
            for _, answer in batch
        ]
    )
    ids = torch.cat([prompts, answers], dim=1)
    labels = torch.cat([torch.full_like(prompts, -100), answers], dim=1)
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    assert isinstance(loss, torch.Tensor)
    return loss


def _accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    held_out: list[str],
    *,
    greedy: bool,
) -> float:
    completions = sample_completions(
        model,
        [tokenizer.encode(f"{letters}>") for letters in held_out],
        max_new_tokens=len(held_out[0]) + 1,
        greedy=greedy,
        pad_token_id=_id_of(tokenizer, PAD),
        eos_token_id=_id_of(tokenizer, EOS),
    )
    right = [
        tokenizer.decode(ids) == letters[::-1]
        for ids, letters in zip(completions, held_out, strict=True)
    ]
    return sum(right) / len(right)
