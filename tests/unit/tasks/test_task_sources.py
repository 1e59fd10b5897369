import json

import pytest

from async_grpo.config.task import TaskSection
from async_grpo.errors import ConfigError
from async_grpo.tasks.arithmetic import ArithmeticTask
from async_grpo.tasks.jsonl import MAX_LINE_BYTES, MAX_PROBLEMS, JsonlTask
from async_grpo.tasks.registry import make_reward, make_task
from async_grpo.tasks.reverse import ReverseTask
from async_grpo.tasks.rewards import exact_match, last_integer


def test_reverse_is_decided_by_seed_and_index():
    task = ReverseTask(seed=1)
    text, answer, metadata = task.question(99_999)
    assert text[-1] == ">"
    assert answer == text[-2::-1]
    assert (len(answer), metadata) == (6, {})
    assert task.question(99_999) == ReverseTask(seed=1).question(99_999)
    assert task.question(99_999) != ReverseTask(seed=2).question(99_999)
    assert len({task.question(index)[0] for index in range(50)}) > 45


def test_fingerprints_follow_every_option():
    prints = [
        ReverseTask(seed=1).fingerprint(),
        ReverseTask(seed=2).fingerprint(),
        ReverseTask(seed=1, length=5).fingerprint(),
        ReverseTask(seed=1, alphabet="abc").fingerprint(),
        ArithmeticTask(seed=1).fingerprint(),
        ArithmeticTask(seed=1, operations="+").fingerprint(),
    ]
    assert len(set(prints)) == len(prints)
    assert ReverseTask(seed=1).fingerprint() == prints[0]


def test_arithmetic_asks_what_it_answers():
    task = ArithmeticTask(seed=0, min_operand=-9, max_operand=9, operations="+-*")
    operations = set()
    for index in range(60):
        text, answer, metadata = task.question(index)
        assert metadata["expression"] in text
        left, operation, right = metadata["expression"].split()
        operations.add(operation)
        truth = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operation]
        assert truth(int(left), int(right)) == int(answer)
        assert task.reward(f"It is {answer}.", answer, metadata) == 1.0
    assert operations == set("+-*")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("42", "42", 1.0),
        ("17 + 25 = 42", "42", 1.0),
        ("17+25=42.", "42", 1.0),
        ("41", "42", 0.0),
        ("no idea", "42", None),
        ("", "42", None),
        ("about 4.2", "2", None),
        ("-5", "-5", 1.0),
        ("12-5", "-5", 0.0),
        ("12-5", "5", 1.0),
        ("\N{MINUS SIGN}5", "-5", 1.0),
        ("it is 1,024", "1024", 1.0),
        ("1,2", "2", 1.0),
        ("007", "7", 1.0),
        ("**73**", "73", 1.0),
        ("9" * 5000, "9", 0.0),
        ("\uff14\uff12", "42", 1.0),
    ],
)
def test_last_integer(completion, answer, reward):
    assert last_integer(completion, answer, {}) == reward


def test_exact_match_ignores_outer_white_space_only():
    assert exact_match(" ab\n", "ab", {}) == 1.0
    assert exact_match("a b", "ab", {}) == 0.0


def write(tmp_path, content: bytes):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    return str(path)


def test_jsonl_rows(tmp_path):
    content = (
        b'\xef\xbb\xbf{"prompt": "p", "answer": 4, "level": 2}\r\n\n{"prompt": "q", "answer": "x"}'
    )
    task = JsonlTask(seed=0, path=write(tmp_path, content))
    assert [task.question(index) for index in range(len(task))] == [
        ("p", "4", {"level": 2}),
        ("q", "x", {}),
    ]


def test_every_bad_row_is_named(tmp_path):
    good = json.dumps({"prompt": "p", "answer": "a"}).encode()
    rows = [
        good,
        b'{"prompt": "p"}',
        b'{"prompt": "p", "answer": ""}',
        b'{"prompt": "p", "answer": null}',
        b'{"prompt": " ", "answer": "a"}',
        b"[1]",
        b"{",
        b'{"prompt": "\xff", "answer": "a"}',
        b'{"prompt": "' + b"x" * MAX_LINE_BYTES + b'", "answer": "a"}',
    ]
    path = write(tmp_path, b"\n".join(rows))
    with pytest.raises(ConfigError) as caught:
        JsonlTask(seed=0, path=path)
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        f"{path}:{number}" for number in range(2, 10)
    ]


def test_a_file_of_nothing_but_bad_rows_gives_a_short_list(tmp_path):
    with pytest.raises(ConfigError) as caught:
        JsonlTask(seed=0, path=write(tmp_path, b"{\n" * 100))
    assert len(caught.value.problems) == MAX_PROBLEMS + 1
    assert "80 more" in caught.value.problems[-1]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match="holds no prompts"):
        JsonlTask(seed=0, path=write(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"task\.options\.path"):
        JsonlTask(seed=0, path=str(tmp_path / "none"))


def test_make_task_passes_options():
    task = make_task(TaskSection(name="reverse", options={"length": 3}), seed=4)
    assert task.question(0) == ReverseTask(seed=4, length=3).question(0)
    same = make_task(TaskSection(name="async_grpo.tasks.reverse:ReverseTask"), seed=4)
    assert same.fingerprint() == ReverseTask(seed=4).fingerprint()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (TaskSection(name="chess"), "task.name: no task 'chess'"),
        (TaskSection(name="no.such.module:Task"), "task.name"),
        (TaskSection(name="reverse", options={"lenght": 3}), "task.options of reverse"),
        (TaskSection(name="reverse", options={"length": 0}), "task.options of reverse"),
        (TaskSection(name="reverse", options={"length": "six"}), "task.options of reverse"),
        (TaskSection(name="jsonl"), "task.options of jsonl"),
        (TaskSection(name="arithmetic", options={"operations": "/"}), "task.options of arithmetic"),
    ],
)
def test_make_task_names_what_is_wrong(section, message):
    with pytest.raises(ConfigError, match=message):
        make_task(section, seed=0)


def test_a_reward_of_the_configuration_replaces_the_tasks_own():
    task = ReverseTask(seed=0)
    assert make_reward(TaskSection(name="reverse"), task) is exact_match
    section = TaskSection(name="reverse", reward="async_grpo.tasks.rewards:last_integer")
    assert make_reward(section, task) is last_integer
    with pytest.raises(ConfigError, match=r"task\.reward"):
        make_reward(TaskSection(name="reverse", reward="async_grpo.tasks.rewards:none"), task)
