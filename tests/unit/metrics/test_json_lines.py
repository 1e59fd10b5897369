"""Files of JSON lines after a kill: torn lines go, whole ones stay."""

import json
from pathlib import Path

import pytest

from async_grpo.metrics.json_lines import JsonLinesFile, cut_torn_line, keep_lines
from async_grpo.metrics.writers import MetricsWriter


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b'{"a": 1}\n', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b', b'{"a": 1}\n'),
        (b'{"torn', b""),
        (b"x" * 200_000 + b"\n" + b"y" * 200_000, b"x" * 200_000 + b"\n"),
        (b"y" * 200_000, b""),
    ],
)
def test_a_torn_last_line_is_cut(before: bytes, after: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(before)
    cut_torn_line(path)
    assert path.read_bytes() == after


def test_what_is_appended_follows_the_last_whole_line_and_is_on_disk_at_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "made" / "lines"
    path.parent.mkdir()
    path.write_bytes(b'{"a": 1}\n{"torn')
    with JsonLinesFile(path) as file:
        file.append({"b": "\u00e9\n"})
        assert [json.loads(line) for line in path.read_bytes().splitlines()] == [
            {"a": 1},
            {"b": "\u00e9\n"},
        ]


def test_a_file_that_is_not_there_is_left_alone(tmp_path: Path) -> None:
    cut_torn_line(tmp_path / "none")
    assert keep_lines(tmp_path / "none", lambda line: True) == 0
    assert list(tmp_path.iterdir()) == []


def test_lines_that_are_not_wanted_go(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n[3]\n{"a": 4}\n{"a": 1')
    assert keep_lines(path, lambda line: line["a"] != 2) == 3
    assert path.read_bytes() == b'{"a": 1}\n{"a": 4}\n'


def test_after_a_fallback_each_step_has_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def line(step: int, incarnation: int) -> dict[str, float]:
        return {"step": step, "policy_version": step + 1, "incarnation": incarnation}

    with MetricsWriter(path, None) as writer:
        for step in range(5):
            writer.write(step, line(step, 1))
    with MetricsWriter(path, None, first_step=3) as writer:
        for step in range(3, 6):
            writer.write(step, line(step, 2))
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(each["step"], each["incarnation"]) for each in lines] == [
        (0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2),
    ]  # fmt: skip
