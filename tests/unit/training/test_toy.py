"""The toy policy: its tokenizer, its warm-up, its refusals."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.errors import AsyncGrpoError, ConfigError
from async_grpo.training.toy import (
    CHARACTERS,
    NOTE,
    make_toy_model,
    make_toy_tokenizer,
    sample_completions,
)

SMALL = {
    "length": 2,
    "alphabet": "ab",
    "batch_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 1,
    "num_held_out": 4,
    "lr": 1e-2,
}


def test_a_prompt_has_one_bos_however_it_is_encoded(tmp_path: Path) -> None:
    tokenizer = make_toy_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    alone = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("abc>")
    assert ids == alone.encode("abc>").ids
    assert ids == AutoTokenizer.from_pretrained(tmp_path).encode("abc>")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 5


def test_every_character_is_one_token_and_comes_back() -> None:
    tokenizer = make_toy_tokenizer()
    ids = tokenizer.encode(CHARACTERS, add_special_tokens=False)
    assert len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS


def test_the_warm_up_stops_at_the_gate_and_says_what_it_measured(tmp_path: Path) -> None:
    make_toy_model(tmp_path / "a", 3, SMALL | {"gate": 0.1})
    note = json.loads((tmp_path / "a" / NOTE).read_text())
    assert note["sampled_accuracy"] >= 0.1
    assert 0.0 <= note["greedy_accuracy"] <= 1.0
    assert note["steps"] >= 40
    assert note["seed"] == 3


def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_toy_model(tmp_path / name, 3, SMALL | {"gate": 0.01})
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("a", "b")
    )
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_gate_out_of_reach_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AsyncGrpoError, match=r"did not reach 1\.1 within 42"):
        make_toy_model(tmp_path / "a", 0, SMALL | {"gate": 1.1, "max_steps": 42})
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "part"),
    [({"lenght": 3, "gat": 1}, "policy.maker_options.gat"), ({"alphabet": "a\u00c4"}, "alphabet")],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        make_toy_model(tmp_path / "a", 0, options)


def test_prompts_of_different_lengths_give_the_same_greedy_answer_as_alone(tmp_path: Path) -> None:
    make_toy_model(tmp_path / "a", 0, SMALL | {"gate": 0.01})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = make_toy_tokenizer()
    prompts = [tokenizer.encode(text) for text in ("ab>", "babab>", "a>")]

    def answers(batch: list[list[int]]) -> list[list[int]]:
        return sample_completions(
            model, batch, max_new_tokens=4, greedy=True, pad_token_id=0, eos_token_id=2
        )

    assert answers(prompts) == [answers([prompt])[0] for prompt in prompts]
