import pytest

from async_grpo.config.eval import EvalSection
from async_grpo.errors import ConfigError
from async_grpo.tasks.arithmetic import ArithmeticTask
from async_grpo.tasks.held_out import split_task


def split(fraction=0.2, num_prompts=10, seed=0, **options):
    """A task of few different prompts, each many times: the same text at many indices."""
    options = {"max_operand": 9, "operations": "+", "num_prompts": 1000, **options}
    section = EvalSection(every=1, num_prompts=num_prompts, held_out_fraction=fraction)
    return split_task(ArithmeticTask(seed=0, **options), section, seed)


def texts(task):
    return [task.question(index)[0] for index in range(len(task))]


def test_training_never_sees_a_held_out_prompt_at_any_index():
    train, held_out = split()

    assert len(train) == 1000
    assert set(texts(train)).isdisjoint(texts(held_out))


def test_held_out_prompts_differ_and_answers_go_with_them():
    _, held_out = split()

    assert len(set(texts(held_out))) == len(held_out) == 10
    for index in range(10):
        _, answer, metadata = held_out.question(index)
        left, _, right = metadata["expression"].split()
        assert int(answer) == int(left) + int(right)


def test_the_share_is_about_the_fraction():
    train, held_out = split(fraction=0.1, num_prompts=50, max_operand=500)
    whole = ArithmeticTask(seed=0, max_operand=500, operations="+", num_prompts=1000)
    moved = sum(a != b for a, b in zip(texts(train), texts(whole), strict=True))

    assert 60 <= moved <= 140
    assert len(held_out) == 50


def test_another_seed_holds_others_out():
    assert set(texts(split(seed=0)[1])) != set(texts(split(seed=1)[1]))


def test_same_everywhere():
    assert texts(split()[1]) == texts(split()[1])
    assert split()[0].fingerprint() == split()[0].fingerprint()
    assert split()[0].fingerprint() != split(seed=1)[0].fingerprint()
    assert split()[1].fingerprint() != split(num_prompts=9)[1].fingerprint()


def test_without_evaluation_nothing_is_held_out():
    task = ArithmeticTask(seed=0)

    assert split_task(task, EvalSection(), 0) == (task, None)


def test_too_few_different_prompts_are_refused_with_their_number():
    with pytest.raises(ConfigError, match=r"eval.num_prompts \(64\) exceeds the \d+ different"):
        split(num_prompts=64)


def test_nothing_left_to_train_on_is_refused():
    train, _ = split(fraction=0.999, num_prompts=1, max_operand=2)

    with pytest.raises(ConfigError, match="no prompt to train on"):
        train.question(0)
