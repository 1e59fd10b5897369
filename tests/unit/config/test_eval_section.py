import pytest

from async_grpo.config.eval import EvalSection
from async_grpo.config.metrics import MetricsSection


def test_defaults_are_sound_and_off() -> None:
    assert list(EvalSection().problems("eval")) == []
    assert EvalSection().every == 0


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("every", -1, "eval.every"),
        ("num_prompts", 0, "eval.num_prompts"),
        ("num_completions", 0, "eval.num_completions"),
        ("max_new_tokens", -1, "eval.max_new_tokens"),
        ("timeout_s", 0.0, "eval.timeout_s"),
        ("temperature", 0.0, "greedy decoding is not offered"),
        ("temperature", float("nan"), "eval.temperature must be > 0"),
        ("held_out_fraction", 0.0, "eval.held_out_fraction must be between 0 and 1"),
        ("held_out_fraction", 1.0, "eval.held_out_fraction must be between 0 and 1"),
    ],
)
def test_each_wrong_value_is_named(field: str, value: float, complaint: str) -> None:
    section = EvalSection()
    setattr(section, field, value)

    (problem,) = section.problems("eval")
    assert complaint in problem


def test_a_negative_number_of_samples_is_refused() -> None:
    (problem,) = MetricsSection(max_samples_per_step=-1).problems("metrics")

    assert "metrics.max_samples_per_step" in problem
