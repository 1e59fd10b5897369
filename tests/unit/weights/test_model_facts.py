"""What follows from config.json: room of the embedded engine's cache, and unsteady positions."""

from typing import Any

import pytest

from async_grpo.config.engine import EngineSection
from async_grpo.errors import ConfigError
from async_grpo.weights.model_facts import (
    paged_context,
    require_steady_positions,
    sliding_window,
    text_config,
    unsteady_border,
)

QWEN3_06B = {
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_size": 1024, "max_position_embeddings": 40960,
}  # fmt: skip
LONGROPE = {
    "max_position_embeddings": 131072,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]},
    "original_max_position_embeddings": 4096,
}
BYTES_PER_TOKEN = 4 * (2 * 28 * 8 * 128 + 256)  # float32: keys and values, and a row of the mask


def context_of(*, max_new_tokens: int = 256, **engine: Any) -> int:
    section = EngineSection(max_batch_tokens=256, max_running_requests=64, **engine)
    return paged_context(QWEN3_06B, section, 4, max_new_tokens=max_new_tokens)


def test_without_a_context_length_the_cache_is_the_limit_if_it_is_less_than_the_models() -> None:
    room = (1 << 30) // (BYTES_PER_TOKEN * 16) * 16
    assert context_of() == room == 4656
    assert context_of(kv_cache_bytes=BYTES_PER_TOKEN * 50_000) == 40960


def test_a_context_that_the_cache_does_not_hold_is_refused_with_what_it_needs() -> None:
    assert context_of(context_length=4656) == 4656
    with pytest.raises(ConfigError, match=f"at least {4672 * BYTES_PER_TOKEN}; or lower engine"):
        context_of(context_length=4657)


def test_a_completion_that_leaves_no_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds 4656 tokens .*_tokens \(4656\) leaves"):
        context_of(max_new_tokens=4656)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(40961\) exceeds the model's limit of 40960"):
        context_of(context_length=40961)


@pytest.mark.parametrize(
    ("config", "border"),
    [
        (LONGROPE, ("longrope", 4096)),
        ({"max_position_embeddings": 9, "rope_scaling": {"rope_type": "dynamic"}}, ("dynamic", 9)),
        (
            {
                "max_position_embeddings": 99,
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "longrope", "original_max_position_embeddings": 32,
                    },
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            ("longrope", 32),
        ),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn"}}, None),
        ({"max_position_embeddings": 64, "rope_scaling": None}, None),
    ],
)  # fmt: skip
def test_positions_that_depend_on_the_longest_sequence_have_a_border(
    config: dict[str, Any], border: tuple[str, int] | None
) -> None:
    assert unsteady_border(config) == border


def test_a_run_that_may_pass_the_border_is_refused_and_one_that_cannot_is_not() -> None:
    require_steady_positions(LONGROPE, 4096)
    with pytest.raises(ConfigError, match=r"engine\.context_length to at most 4096 \(it is 4097\)"):
        require_steady_positions(LONGROPE, 4097)
    with pytest.raises(ConfigError, match=r"\(it is 0, and the model allows 131072\)"):
        require_steady_positions(LONGROPE, 0)
    require_steady_positions(QWEN3_06B, 0)


def test_the_part_about_text_is_found() -> None:
    assert text_config({"text_config": {"sliding_window": 7}})["sliding_window"] == 7
    assert sliding_window({"sliding_window": None}) == 0
