"""Time limits against what must happen within them."""

from pathlib import Path

import pytest

from async_grpo.config.limits import checkpoint_warning, time_warnings
from async_grpo.config.load import load_config
from async_grpo.config.schema import Config

LONG = ["generation.max_new_tokens=32768", "replay.max_bytes=100000000000"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        "run: {output_dir: out, num_train_steps: 10}\npolicy: {model: m}\ntask: {name: reverse}\n"
    )
    return path


def sglang(base: Path, *overrides: str) -> Config:
    return load_config(base, ["engine.kind=sglang", "engine.python=p", *overrides])


def test_limits_that_long_completions_pass_are_named_with_the_value(base: Path) -> None:
    group, request = time_warnings(load_config(base, LONG))
    assert group.startswith("generation.group_timeout_s (600) is below 1639, which max_new_tokens")
    assert request.startswith("generation.request_timeout_s (300) is below 1639, which max_new_")
    enough = ["generation.group_timeout_s=1639", "generation.request_timeout_s=1639"]
    assert list(time_warnings(load_config(base, [*LONG, *enough]))) == []


def test_a_request_limit_beyond_the_groups_has_no_effect(base: Path) -> None:
    (warning,) = time_warnings(load_config(base, ["generation.request_timeout_s=601"]))
    assert warning.startswith("generation.group_timeout_s (600) is below generation.request_timeo")


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["weights.timeout_s=299"], False),
        (["weights.timeout_s=300"], True),
        (["weights.timeout_s=300", "engine.server_args=['--watchdog-timeout=400']"], False),
        (["weights.timeout_s=400", "engine.server_args=['--watchdog-timeout','400']"], True),
        (["weights.timeout_s=50", "engine.server_args=['--watchdog-timeout','40']"], True),
    ],
)
def test_an_update_ends_before_sglangs_watchdog(
    base: Path, overrides: list[str], warned: bool
) -> None:
    found = list(time_warnings(sglang(base, *overrides)))
    assert len(found) == warned
    assert all("is not below SGLang's watchdog" in warning for warning in found)


def test_the_embedded_engine_has_no_watchdog(base: Path) -> None:
    assert list(time_warnings(load_config(base, ["weights.timeout_s=900"]))) == []


def test_a_stop_leaves_time_for_its_checkpoint(base: Path) -> None:
    """1.7 billion parameters in bfloat16: 24.1 GB at 0.3 GB/s, in six tenths of the limit."""
    large = ["policy.dtype=bfloat16"]
    warning = checkpoint_warning(load_config(base, large), 1_720_000_000)
    assert warning.startswith("launch.shutdown_timeout_s (10) is below 134: a checkpoint of 22.4 G")
    enough = load_config(base, [*large, "launch.shutdown_timeout_s=134"])
    assert checkpoint_warning(enough, 1_720_000_000) == ""
    assert checkpoint_warning(load_config(base), 100_000) == ""
