"""Alarms and the depth controller: what cannot act or makes no sense is refused and named."""

from pathlib import Path

import pytest

from async_grpo.config.alarms import KINDS, AlarmAction, AlarmsSection
from async_grpo.config.load import agreement_digest, load_config
from async_grpo.config.resume import resume_problems
from async_grpo.config.rules import max_groups
from async_grpo.errors import ConfigError
from async_grpo.launch.check import describe
from async_grpo.metrics.registry import METRICS
from async_grpo.replay.core.settings import CoreSettings

DOCS = Path(__file__).parents[3] / "docs" / "alarms.md"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        "run: {output_dir: out, num_train_steps: 10}\npolicy: {model: m}\ntask: {name: reverse}\n"
    )
    return path


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["alarms.patience=0"], "alarms.patience must be > 0"),
        (["alarms.ess_min=0"], "alarms.ess_min must be > 0"),
        (
            ["alarms.k3_max=null", "alarms.k3_action=stop"],
            "alarms.k3_action has no effect with alarms.k3_max=null",
        ),
        (["alarms.lr_factor=0.1"], "alarms.lr_factor has no effect: no alarm has the action"),
        (
            ["alarms.lr_factor=1.5", "alarms.ess_action=scale_lr"],
            "alarms.lr_factor must be between 0 and 1, got 1.5",
        ),
        (
            ["alarms.ess_action=shrink_depth", "staleness.force=2"],
            "alarms.ess_action=shrink_depth cannot move what staleness.force holds",
        ),
        (
            ["alarms.ess_action=shrink_depth", "weights.publish_every=3"],
            "weights.publish_every - 1 (2) already, the smallest",
        ),
        (["staleness.target_ess=0.7"], "staleness.target_ess has no effect with"),
        (
            ["staleness.controller=ess", "staleness.target_ess=1"],
            "staleness.target_ess must be between 0 and 1",
        ),
        (
            ["staleness.controller=ess", "staleness.max_staleness=0"],
            "staleness.controller=ess needs staleness.max_staleness > 0",
        ),
        (
            ["staleness.controller=ess", "staleness.force=2"],
            "staleness.controller=ess cannot move what staleness.force holds",
        ),
    ],
)
def test_what_cannot_act_is_refused(base: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base, overrides)
    assert any(expected in problem for problem in caught.value.problems), caught.value.problems


def test_a_controlled_depth_gets_room_for_the_deepest(base: Path) -> None:
    fixed = load_config(base)
    controlled = load_config(base, ["staleness.controller=ess", "weights.publish_every=2"])
    assert fixed.staleness.depth == controlled.staleness.depth == 2
    assert max_groups(fixed) == (2 + 1 + 1) * 16
    assert max_groups(controlled) == (4 + 1 + 1) * 16
    settings = CoreSettings.from_config(controlled)
    assert (settings.min_depth, settings.pipeline_depth, settings.deepest) == (1, 2, 4)
    settings = CoreSettings.from_config(load_config(base, ["staleness.force=2"]))
    assert (settings.min_depth, settings.deepest) == (2, 2)
    with pytest.raises(ConfigError, match=r"draw_order=ticket\) of up to"):
        load_config(
            base,
            ["staleness.controller=ess", "staleness.draw_order=ticket", "replay.max_bytes=1000000"],
        )


def test_alarms_are_the_trainers_own_and_may_change_when_a_run_goes_on(base: Path) -> None:
    before, after = load_config(base), load_config(base, ["alarms.ess_action=stop"])
    assert agreement_digest(before) == agreement_digest(after)
    assert resume_problems(before, after) == []
    controlled = load_config(base, ["staleness.controller=ess"])
    assert agreement_digest(before) != agreement_digest(controlled)


def test_the_page_has_every_alarm_with_its_metric_and_default() -> None:
    text = DOCS.read_text()
    for kind in KINDS:
        threshold = AlarmsSection().threshold(kind)
        side = "<" if kind.is_floor else ">"
        row = f"| `{kind.name}` | `{kind.metric}` | {side} {threshold:g}"
        assert row in text
        assert kind.metric in METRICS
    for action in AlarmAction:
        assert f"| `{action}`" in text


def test_check_tells_what_may_act(base: Path) -> None:
    told = describe(load_config(base))
    assert "# alarms" not in told
    assert "# depth controller" not in told
    overrides = ["staleness.controller=ess", "alarms.ess_action=stop", "alarms.k3_action=scale_lr"]
    told = describe(load_config(base, overrides))
    assert "# alarms                stop: ess; scale_lr: k3; the others warn\n" in told
    assert "# depth controller      D moves within 0 to 4 to hold an ESS of 0.8\n" in told
