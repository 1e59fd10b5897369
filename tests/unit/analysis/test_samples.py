import json
from pathlib import Path
from typing import Any

import pytest

from async_grpo.analysis.samples import format_samples, printable, read_samples
from async_grpo.errors import ConfigError


def sample(version: int, **changes: Any) -> dict[str, Any]:
    return {
        "policy_version": version, "kind": "train", "outcome": "stored", "group_id": 7,
        "attempt": 1, "prompt_index": 3, "prompt": "abc>", "answer": "cba", "text": "cbb",
        "num_tokens": 3, "finish_reason": "stop", "reward_outcome": "scored", "reward": 0.5,
        "reward_parts": {"format": 0.1, "letters": 0.4},
        "segments": [
            {"weights": "1.2", "num_tokens": 1, "kv_mixed": False},
            {"weights": "1.3", "num_tokens": 2, "kv_mixed": True},
        ],
        "generator": "g", "engine_id": "g/0#1", **changes,
    }  # fmt: skip


def run_dir(tmp_path: Path, *samples: dict[str, Any], tail: str = "") -> Path:
    text = "".join(json.dumps(item) + "\n" for item in samples) + tail
    (tmp_path / "samples.jsonl").write_text(text)
    return tmp_path


def test_every_fact_is_shown(tmp_path: Path) -> None:
    text = format_samples(read_samples(run_dir(tmp_path, sample(3))))

    assert text == "\n".join(
        [
            "=== step 3, group 7, attempt 1: stored ===",
            "prompt:",
            "  | abc>",
            "completion (3 tokens, ended by stop):",
            "  | cbb",
            'reward:   0.5 = format 0.1 + letters 0.4 (scored); expected "cba"',
            "versions: 1.2 (1 tokens), then 1.3 (2 tokens, KV of earlier weights)",
        ]
    )


def test_a_completion_without_a_reward_and_an_evaluation_say_so(tmp_path: Path) -> None:
    lines = [sample(1, kind="eval", outcome="reward_failed", reward=None, reward_parts={},
                    reward_outcome="timeout")]  # fmt: skip

    text = format_samples(read_samples(run_dir(tmp_path, *lines)))

    assert "=== step 1, evaluation, group 7, attempt 1: reward_failed ===" in text
    assert "reward:   none (timeout)" in text


def test_selection_by_step_and_by_the_last_versions(tmp_path: Path) -> None:
    directory = run_dir(tmp_path, *[sample(v, group_id=n) for n, v in enumerate([2, 0, 1, 2])])

    def groups(**options: int) -> list[int]:
        return [item["group_id"] for item in read_samples(directory, **options)]

    assert groups() == [1, 2, 0, 3]
    assert groups(step=2) == [0, 3]
    assert groups(last=2) == [2, 0, 3]
    assert groups(last=0) == []
    with pytest.raises(ConfigError, match=r"no sample of step 9; it holds steps 0 to 2"):
        groups(step=9)


def test_terminal_escapes_and_hidden_characters_are_shown_not_obeyed(tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]0;title\x07\r\nok\u202e\u200b\x9b31m"

    text = format_samples(read_samples(run_dir(tmp_path, sample(0, text=evil, answer=evil))))

    assert all(character.isprintable() or character == "\n" for character in text)
    assert r"  | \x1b[2J\x1b]0;title\x07\r" in text
    assert r"  | ok\u202e\u200b\x9b31m" in text


def test_printable_keeps_letters_of_any_language() -> None:
    assert printable("Grüße 你好 🙂") == "Grüße 你好 🙂"


def test_torn_last_line_is_left_out_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(read_samples(run_dir(tmp_path, sample(0), tail='{"policy_ver'))) == 1
    assert caplog.text == ""


def test_bad_lines_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tail = "{torn\n[1]\n" + json.dumps(sample(1)) + "\n"

    found = read_samples(run_dir(tmp_path, sample(0), tail=tail))

    assert [item["policy_version"] for item in found] == [0, 1]
    assert "line 2 is no JSON" in caplog.text
    assert "line 3 is no sample" in caplog.text


def test_missing_file_says_who_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_samples_per_step"):
        read_samples(tmp_path)
