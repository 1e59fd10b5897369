"""Presets are whole, and what has no effect or no meaning is refused with the reason."""

from pathlib import Path

import pytest

from async_grpo.config.algorithm import Aggregation, AlgorithmSection, Anchor, preset_section
from async_grpo.config.load import load_config, to_yaml
from async_grpo.config.objective import objective_problems, objective_warnings
from async_grpo.config.objective_text import clip_note, objective_line
from async_grpo.config.presets import PRESETS, Preset
from async_grpo.errors import ConfigError

DOCS = Path(__file__).parents[3] / "docs" / "objectives.md"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "run: {output_dir: out, num_train_steps: 3}\n"
        "policy: {model: m}\n"
        "task: {name: reverse}\n"
        "generation: {max_new_tokens: 100}\n"
    )
    return path


def problems(section: AlgorithmSection) -> list[str]:
    return list(objective_problems(section, "algorithm"))


@pytest.mark.parametrize("preset", Preset)
def test_a_preset_has_no_problem_a_line_of_its_own_and_a_place_in_the_docs(preset: Preset) -> None:
    section = preset_section(preset)
    assert problems(section) == []
    line = objective_line(section)
    assert "\n" not in line
    others = [objective_line(preset_section(name)) for name in Preset if name is not preset]
    # AIPO's stop-gradient form is CISPO's: they differ in the cap alone
    assert line not in others
    assert f"`{preset}`" in DOCS.read_text()


def test_every_preset_is_defined() -> None:
    assert set(PRESETS) == set(Preset)


def test_the_default_is_what_it_was() -> None:
    assert AlgorithmSection() == preset_section("default")
    assert objective_line(AlgorithmSection()) == (
        "advantage (R - mean) / (std + 1e-08), population std; token-level ratio clipped to "
        "[0.8, 1.28] around the proximal policy, dual clip 3; behavior_weight <= 2 per token; "
        "token_mean over the global batch; KL off"
    )


def test_grpo_is_the_published_one() -> None:
    assert objective_line(preset_section("grpo")) == (
        "advantage (R - mean) / (std + 1e-08), population std; token-level ratio clipped to "
        "[0.8, 1.2] around the behavior policy, no dual clip; no behavior weight; "
        "sequence_mean_token_mean over the global batch; + 0.04 * k3 against the initial policy"
    )


def test_a_preset_lies_below_every_field_of_ones_own(base: Path, tmp_path: Path) -> None:
    base.write_text(base.read_text() + "algorithm: {clip_high: 0.3, preset: grpo}\n")
    config = load_config(base)
    assert config.algorithm.anchor is Anchor.behavior
    assert config.algorithm.clip_high == 0.3
    assert config.algorithm.dual_clip is None
    config = load_config(base, ["algorithm.preset=dr_grpo", "algorithm.clip_low=0.1"])
    assert config.algorithm.aggregation is Aggregation.constant
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.1, 0.3)
    assert config.algorithm.length_limit == 100
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(config))
    assert load_config(resolved) == config


def test_an_unknown_preset_is_one_problem(base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base, ["algorithm.preset=gpro"])
    (problem,) = caught.value.problems
    assert "algorithm.preset" in problem


@pytest.mark.parametrize(
    ("preset", "fields", "expected"),
    [
        ("default", {"anchor": "behavior"}, "corrects twice"),
        ("default", {"ratio_cap": 2.0}, "ratio_cap has no effect with surrogate=ppo"),
        ("cispo", {"clip_low": 0.1}, "clip_low has no effect with surrogate=cispo"),
        (
            "dr_grpo",
            {"advantage_eps": 1e-4},
            "has no effect with advantage=mean_only",
        ),
        ("grpo", {"behavior_weight_cap": 3.0}, "has no effect with behavior_weight=none"),
        ("default", {"denominator": "kept"}, "denominator has no effect with nothing rejected"),
        ("default", {"kl_estimator": "k2"}, "kl_estimator has no effect with kl_coef=0"),
        ("grpo", {"kl_ratio_cap": 2.0}, "kl_ratio_cap has no effect with kl_correction=none"),
        ("grpo", {"kl_estimator": "k1"}, "expected gradient of 0"),
        ("grpo", {"kl_estimator": "k2", "kl_correction": "through"}, "has not the gradient"),
        ("topr", {"ratio_level": "token"}, "which is defined for: sequence"),
        ("gmpo", {"ratio_level": "geometric"}, "which is defined for: token"),
        ("gpg", {"anchor": "behavior"}, "anchor has no effect with surrogate=reinforce"),
        ("grpo", {"proximal": "interpolate"}, "nothing uses the proximal policy"),
        ("a3po", {"reject_m2": 0.1}, "saves the pass"),
        ("default", {"proximal_interpolation": "linear"}, "has no effect with proximal=auto"),
        ("default", {"reject_m2_tokens": "all"}, "has no effect with reject_m2=null"),
        ("default", {"reject_sequence_level": "sequence"}, "no bound for sequences"),
        ("geo_rs", {"reject_sequence_level": "token"}, "see reject_token_*"),
        ("default", {"length_limit": 10}, "length_limit has no effect"),
        ("icepop", {"behavior_weight_floor": 6.0}, "must be below algorithm.behavior_weight_cap"),
        ("default", {"reject_token_low": 2.0, "reject_token_high": 1.0}, "must be below"),
        ("default", {"reject_veto": 0.0}, "reject_veto must be > 0"),
        ("default", {"surrogate": "pop"}, "surrogate must be one of ppo, gmpo"),
        ("default", {"advantage": "gpro"}, "advantage must be one of grpo"),
        ("default", {"reject_custom": ["mask"]}, "package.module:attribute"),
        ("default", {"dual_clip": 1.2}, "dual_clip must exceed"),
    ],
)
def test_what_has_no_meaning_is_refused(preset: str, fields: dict, expected: str) -> None:
    found = problems(preset_section(preset, **fields))
    assert any(expected in problem for problem in found), found
    assert all(problem.startswith("algorithm.") for problem in found)


def test_a_presets_own_value_may_lie_idle() -> None:
    assert problems(preset_section("grpo", kl_coef=0.0)) == []
    assert problems(preset_section("cispo", surrogate="ppo")) == []
    (problem,) = problems(preset_section("cispo", surrogate="ppo", ratio_cap=7.0))
    assert "ratio_cap has no effect" in problem


def test_the_overlong_buffer_fits_the_length(base: Path) -> None:
    load_config(base, ["algorithm.overlong_buffer_tokens=100"])
    with pytest.raises(ConfigError, match=r"overlong_buffer_tokens \(101\) must be <="):
        load_config(base, ["algorithm.overlong_buffer_tokens=101"])


def warnings(section: AlgorithmSection, updates: int = 1, staleness: int = 4) -> list[str]:
    return list(objective_warnings(section, updates_per_step=updates, max_staleness=staleness))


def test_what_corrects_for_nothing_is_warned_of() -> None:
    (warning,) = warnings(preset_section("uncorrected"))
    assert "corrects for nothing" in warning
    assert warnings(preset_section("uncorrected"), staleness=0) == []
    assert warnings(preset_section("default")) == []
    (warning,) = warnings(preset_section("grpo"))
    assert "kl_correction=none is right on policy only" in warning
    (warning,) = warnings(preset_section("default", proximal="recompute"))
    assert "costs a pass" in warning
    assert warnings(preset_section("default", proximal="recompute"), updates=2) == []


def test_an_entropy_bonus_is_in_the_line_and_never_negative() -> None:
    line = objective_line(preset_section("default", entropy_coef=0.01))
    assert line.endswith("; - 0.01 * entropy of the policy")
    refused = "\n".join(problems(preset_section("default", entropy_coef=-0.1)))
    assert "algorithm.entropy_coef must be >= 0" in refused


def test_an_inert_clip_is_called_inert() -> None:
    default = preset_section("default")
    assert clip_note(default, 1) == "one update per step; the bound is behavior_weight <= 2"
    assert clip_note(default, 2) == ""
    assert clip_note(preset_section("grpo"), 1) == ""
    assert "no other bound" in clip_note(preset_section("uncorrected"), 1)
