"""docs/extending.md says the truth: what stands there is loaded and run."""

import re
from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from async_grpo.launch import cli
from async_grpo.tasks.registry import make_reward, make_task
from async_grpo.tasks.reward_pool import ProcessRewardPool
from async_grpo.types import Prompt, RewardOutcome

PAGE = Path(__file__).resolve().parents[3] / "docs" / "extending.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (python,) = blocks("python")
    (tmp_path / "vowels.py").write_text(python)
    jsonl, own = blocks("yaml")
    (tmp_path / "vowels.yaml").write_text(own)
    (tmp_path / "jsonl.yaml").write_text(own.split("task:")[0] + jsonl)
    (tmp_path / "problems.jsonl").write_text('{"prompt": "a", "answer": "e", "length": 3}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


async def test_the_task_and_its_reward(folder: Path) -> None:
    config = load_config(folder / "vowels.yaml")
    task = make_task(config.task, config.run.seed)
    assert len(task) == 3
    text, answer, metadata = task.question(1)
    assert (text, answer, metadata) == ("house:", "house", {"length": 5})
    pool = ProcessRewardPool(
        make_reward(config.task, task),
        workers=1,
        timeout_s=20.0,
        unparseable_reward=config.task.unparseable_reward,
    )
    prompt = Prompt(index=1, text=text, token_ids=[1], answer=answer, metadata=metadata)
    try:
        await pool.start()
        scores = await pool.score(["aei", "xyz", ""], prompt)
    finally:
        await pool.close()
    assert scores[0] == (RewardOutcome.SCORED, 1.1, {"vowels": 1.0, "length": 0.1})
    assert scores[1] == (RewardOutcome.SCORED, 0.1, {"vowels": 0.0, "length": 0.1})
    assert scores[2][:2] == (RewardOutcome.UNPARSEABLE, 0.0)


def test_data_without_code_with_a_reward_of_our_own(folder: Path) -> None:
    config = load_config(folder / "jsonl.yaml")
    task = make_task(config.task, config.run.seed)
    assert task.question(0) == ("a", "e", {"length": 3})
    reward = make_reward(config.task, task)
    assert reward("aa", "e", {"length": 3}) == {"vowels": 1.0, "length": 0.1}


def test_check_accepts_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "vowels.yaml"]) == 0
    assert "name: vowels:Vowels" in capsys.readouterr().out
