"""The configurations that are shipped, and replies in the style of the model that they train."""

from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from async_grpo.config.rules import warnings
from async_grpo.tasks.registry import make_reward, make_task

CONFIGS = Path(__file__).parents[3] / "configs"
CHATS = sorted(path.name for path in CONFIGS.glob("*.yaml") if "jsonl" in path.read_text())

THOUGHT = r"""<think>
Okay, so I need to find how many clips Natalia sold altogether in April and May. In April she sold
clips to 48 of her friends. Then in May she sold half as many, so that is 48/2 = 24. Wait, is "half
as many" of the clips or of the friends? One clip each, so it is the same. Then \boxed{24}? No, the
question asks for both months: 48 + 24 = 72. Let me check again: 72 - 24 = 48. Yes.
</think>

"""
RIGHT = (
    THOUGHT
    + r"""To determine how many clips Natalia sold altogether, we add both months.

**Step 1:** In April she sold $48$ clips.

**Step 2:** In May she sold $\frac{48}{2} = 24$ clips.

**Final Answer:**

$$
\boxed{72}
$$"""
)
WRONG = RIGHT.replace(r"\boxed{72}", r"\boxed{24}")
CUT_OFF = THOUGHT.partition("</think>")[0]


@pytest.fixture(params=CHATS)
def config(request, tmp_path):
    (tmp_path / "math.jsonl").write_text('{"prompt": "Natalia sold clips ...", "answer": 72}\n')
    return load_config(CONFIGS / request.param, [f"task.options.path={tmp_path}/math.jsonl"])


def test_the_gpu_configurations_are_among_them():
    assert {"one_gpu.yaml", "qwen3_8gpu.yaml", "qwen3_nodes.yaml"} <= set(CHATS)


def test_a_right_reply_earns_1_a_wrong_one_0_and_one_that_was_cut_off_0(config):
    task = make_task(config.task, config.run.seed)
    reward = make_reward(config.task, task)
    _, answer, metadata = task.question(0)

    def earned(completion):
        value = reward(completion, answer, metadata)
        return config.task.unparseable_reward if value is None else value

    assert [earned(text) for text in (RIGHT, WRONG, CUT_OFF)] == [1.0, 0.0, 0.0]


def test_nothing_in_it_is_unwise(config):
    assert warnings(config) == []
