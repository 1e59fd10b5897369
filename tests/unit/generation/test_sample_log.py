import json
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.generation.sample_log import MAX_TEXT_CHARACTERS, SampleLog, ScoredGroup
from async_grpo.generation.sampler import Sampled
from async_grpo.types import (
    Completion,
    FinishReason,
    Prompt,
    RewardOutcome,
    Segment,
    Ticket,
    TicketKind,
    WeightsName,
)

PROMPT = Prompt(index=3, text="abc>", token_ids=[1, 2], answer="cba")


def scored_group(
    version: int,
    *rewards: float,
    group_id: int = 0,
    kind: TicketKind = TicketKind.TRAIN,
    text: str = "text",
) -> ScoredGroup:
    """One member per reward; its second token was sampled by `version`."""
    segments = [
        Segment(WeightsName(1, version - 1), 1),
        Segment(WeightsName(1, version), 1, kv_mixed=True),
    ]
    members = [
        Sampled(
            Completion(
                prompt_token_ids=np.array([1, 2], dtype=np.int32),
                token_ids=np.array([5, 6], dtype=np.int32),
                behavior_logprobs=np.zeros(2, dtype=np.float32),
                segments=segments,
                finish_reason=FinishReason.STOP,
                temperature=1.0,
            ),
            "g/0#1",
            0.0,
            1.0,
        )
        for _ in rewards
    ]
    scores = [
        (RewardOutcome.SCORED if reward == reward else RewardOutcome.TIMEOUT, reward, {"a": 1.0})
        for reward in rewards
    ]
    texts = [f"{text} {position}" for position in range(len(rewards))]
    return ScoredGroup(Ticket(group_id, 1, 3, kind), PROMPT, members, texts, scores)


def log_of(tmp_path: Path, *groups: ScoredGroup, limit: int = 4) -> list[dict[str, Any]]:
    path = tmp_path / "samples.jsonl"
    with SampleLog(path, generator="g", max_per_version=limit) as log:
        for group in groups:
            log.finished(group, "stored")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_worst_and_the_best_of_a_group_are_kept(tmp_path: Path) -> None:
    lines = log_of(tmp_path, scored_group(3, 0.5, 1.0, 0.0, 0.5))

    assert [(line["text"], line["reward"]) for line in lines] == [("text 1", 1.0), ("text 2", 0.0)]


def test_one_line_tells_everything(tmp_path: Path) -> None:
    (line,) = log_of(tmp_path, scored_group(3, 1.0, 1.0))

    assert line == {
        "policy_version": 3, "kind": "train", "outcome": "stored", "group_id": 0, "attempt": 1,
        "prompt_index": 3, "prompt": "abc>", "answer": "cba", "text": "text 0", "num_tokens": 2,
        "finish_reason": "stop", "reward_outcome": "scored", "reward": 1.0,
        "reward_parts": {"a": 1.0},
        "segments": [
            {"weights": "1.2", "num_tokens": 1, "kv_mixed": False},
            {"weights": "1.3", "num_tokens": 1, "kv_mixed": True},
        ],
        "generator": "g", "engine_id": "g/0#1",
    }  # fmt: skip


def test_bounded_per_version_and_kind(tmp_path: Path) -> None:
    groups = [scored_group(1, 0.0, 1.0, group_id=n) for n in range(5)]
    groups += [scored_group(1, 0.0, 1.0, group_id=-1, kind=TicketKind.EVAL)]
    groups += [scored_group(2, 0.0, 1.0, group_id=9)]
    groups += [scored_group(1, 0.0, 1.0, group_id=10)]  # late: its version's share is over

    lines = log_of(tmp_path, *groups, limit=3)

    assert [(line["policy_version"], line["group_id"]) for line in lines] == [
        (1, 0), (1, 0), (1, 1), (1, -1), (1, -1), (2, 9), (2, 9),
    ]  # fmt: skip


def test_a_group_without_rewards_is_kept_too(tmp_path: Path) -> None:
    lines = log_of(tmp_path, scored_group(1, float("nan"), float("nan")))

    assert [(line["reward"], line["reward_outcome"]) for line in lines] == [(None, "timeout")]


def test_long_texts_lose_their_middle(tmp_path: Path) -> None:
    (line,) = log_of(tmp_path, scored_group(1, 1.0, text="x" * 10_000))

    assert len(line["text"]) < MAX_TEXT_CHARACTERS + 50
    assert "[... 6002 characters ...]" in line["text"]
    assert line["text"].endswith("x 0")


def test_none_are_written_when_switched_off(tmp_path: Path) -> None:
    log_of(tmp_path, scored_group(1, 1.0), limit=0)

    assert not (tmp_path / "samples.jsonl").exists()
