"""What the script for a first day on a card does with parts that fail, and how it counts."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

TOOLS = Path(__file__).parents[3] / "tools"
SCRIPT = """
import json, pathlib, sys, time
name, result = sys.argv[2], pathlib.Path(sys.argv[4])
settings = json.loads(sys.argv[6])
if name == "step":
    print("CUDA out of memory", flush=True)
    sys.exit(1)
if name == "step_checkpointed":
    time.sleep(60)
result.write_text(json.dumps({"limit": settings["limit_s"], "engine": settings["engine_url"]}))
"""
ENGINE = ["-c", """print('{"url": "http://there"}', flush=True); import time; time.sleep(60)"""]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the script, which find each other beside it."""
    monkeypatch.syspath_prepend(str(TOOLS))
    names = ("gpu_day_engine", "gpu_day_parts", "gpu_day")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


def day(tools: Any, place: Path, limit_s: float = 60.0) -> Any:
    script = place / "script.py"
    script.write_text(SCRIPT)
    settings = tools.gpu_day.Settings(directory=str(place), cpu=True)
    return tools.gpu_day.Day(settings, limit_s, str(script))


def test_a_part_that_fails_or_is_late_is_recorded_and_the_others_go_on(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tools.gpu_day_parts.PARTS
    monkeypatch.setattr(tools.gpu_day, "LEAST_S", 0.5)
    late = tools.gpu_day_parts.Part(parts["step_checkpointed"].run, 1.0)
    monkeypatch.setitem(parts, "step_checkpointed", late)
    a_day = day(tools, tmp_path, limit_s=600.0)
    a_day.run(["step", "step_checkpointed", "self_test", "quickstart"])
    found = {record.name: record for record in a_day.records}
    assert {name: record.status for name, record in found.items()} == {
        "self_test": "ok", "step": "failed", "step_checkpointed": "late", "quickstart": "ok",
    }  # fmt: skip
    assert found["step"].error == "exit code 1: CUDA out of memory"
    assert "not done within 1 s; see " in found["step_checkpointed"].error
    assert found["step_checkpointed"].seconds < 20.0
    assert found["self_test"].figures == {"limit": parts["self_test"].limit_s, "engine": ""}


def test_parts_share_one_engine_and_all_time_there_is(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = [sys.executable, *ENGINE]
    monkeypatch.setattr(tools.gpu_day_engine, "command", lambda settings: engine)
    a_day = day(tools, tmp_path, limit_s=40.0)
    a_day.run(["transport_disk", "doctor"])
    started, *others = a_day.records
    assert (started.name, started.status) == ("engine: embedded", "ok")
    assert [record.status for record in others] == ["ok", "ok"]
    for record in others:
        assert record.figures["engine"] == "http://there"
        assert record.limit_s < 40.0, "less than its own"


def test_without_an_engine_what_needs_one_is_not_run(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = [sys.executable, "-c", "raise SystemExit('no kernel image is available')"]
    monkeypatch.setattr(tools.gpu_day_engine, "command", lambda settings: engine)
    a_day = day(tools, tmp_path)
    a_day.run(["self_test", "doctor"])
    assert [record.status for record in a_day.records] == ["ok", "failed", "not run"]
    assert "no kernel image is available" in a_day.records[1].error


def test_no_part_is_begun_when_the_time_is_over(tools: Any, tmp_path: Path) -> None:
    a_day = day(tools, tmp_path, limit_s=1.0)
    a_day.run(["self_test"])
    (record,) = a_day.records
    assert (record.status, record.error) == ("not run", "no time was left")


def test_the_table_has_a_row_for_each_part(tools: Any) -> None:
    record = tools.gpu_day.Record
    text = tools.gpu_day.to_markdown(
        [
            record("step", "ok", 12.34, 90.0, "", {"tokens_per_s": 12345.678, "stopped": "no"}),
            record("doctor", "failed", 1.0, 90.0, "a | b"),
        ],
        "torch 2.14.1, 1 x NVIDIA H200 (139.8 GiB)",
    )
    assert "on: torch 2.14.1, 1 x NVIDIA H200 (139.8 GiB)." in text
    assert "| step | ok | 12.3 | tokens_per_s 1.235e+04; stopped no |" in text
    assert "| doctor | failed | 1.0 | a / b |" in text


def test_flops_of_a_token_are_those_of_the_papers_formula(tools: Any) -> None:
    shape = tools.gpu_day_parts.QWEN3_1_7B
    with torch.device("meta"):
        module = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    layer = 2048 * (2048 + 2 * 1024) + 2048 * 2048 + 3 * 2048 * 6144
    multiplied = 28 * layer + 151_936 * 2048
    model = SimpleNamespace(module=module)
    found = tools.gpu_day_parts.flops_per_token(model, 8192)
    assert found == 6 * multiplied + 12 * 28 * 16 * 128 * 8192
    assert math.isclose(found, 15.96e9, rel_tol=1e-2)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 0.0),
        ("Quadro", 0.0),
    ],
)
def test_the_peak_of_a_card_is_found_by_its_name(tools: Any, name: str, flops: float) -> None:
    assert tools.gpu_day_parts.peak_of(name) == flops


def test_figures_of_a_run_are_medians_of_its_steps(tools: Any) -> None:
    lines: list[dict[str, Any]] = [
        {"step": number, "reward/mean": number / 10, "time/step_s": 0.5, "sync/pause_s": pause}
        for number, pause in enumerate((None, 3.0, 1.0, 2.0))
    ]
    found = tools.gpu_day_engine.run_figures([*lines, {"eval/reward_mean": 1.0}])
    assert found == {
        "steps": 4, "steps_per_s": 2.0, "reward_first": 0.0, "reward_last": 0.3, "pause_s": 2.0,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="no step was trained"):
        tools.gpu_day_engine.run_figures([])
    assert json.loads(json.dumps(found)) == found
