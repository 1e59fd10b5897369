"""The reward for mathematics: what it accepts, and what it must not be talked into."""

import time

import pytest

from async_grpo.tasks.rewards import boxed_answer, last_integer

EQUAL = [
    ("42", "42"),
    ("042", "42"),
    ("42.", "42"),
    ("+42", "42"),
    ("42.0", "42"),
    ("42.50", "42.5"),
    (".5", "0.5"),
    ("-0", "0"),
    ("\N{MINUS SIGN}7", "-7"),
    ("-7", "\N{MINUS SIGN}7"),
    ("1,000", "1000"),
    ("1{,}000", "1,000"),
    (r"1\,000", "1000"),
    ("12,345,678.90", "12345678.9"),
    (r"\$18", "18"),
    ("$18$", "$18.0"),
    (r"50\%", "50"),
    ("50%", "50%"),
    (r"\frac{1}{2}", "1/2"),
    (r"\dfrac{2}{4}", "0.5"),
    (r"-\tfrac{3}{4}", "-3/4"),
    (r"\frac34", "0.75"),
    (r"\frac{1,000}{3}", "1000/3"),
    (r"18\text{ dollars}", "18"),
    (r"18 \,\mathrm{cm}", "18"),
    (r"90^\circ", "90"),
    (r"\text{Tuesday}", "Tuesday"),
    (r"\left( 1, 2 \right)", "(1,2)"),
    (r"x^2 + 1", "x^2+1"),
    (r"\{1, 2\}", r"\{1,2\}"),
    (r"\frac{x}{x + 1}", r"\dfrac{x}{x+1}"),
    ("9" * 60, "9" * 60),
    ("72", "She sold 48/2 = <<48/2=24>>24.\n#### 72"),
    ("1000", "#### 1,000"),
    ("5", r"so the answer is $\boxed{5}$"),
]

DIFFERENT = [
    ("41", "42"),
    ("4 2", "42"),
    ("42, 43", "42"),
    ("42 or 43", "42"),
    ("42,43,44", "42"),
    (r"42\text{ or }43", "42"),
    ("42/0", "42"),
    ("-42", "42"),
    ("--42", "42"),
    ("4.2", "42"),
    ("1,00", "100"),
    ("10,200", "(10,200)"),
    (r"1\frac{1}{2}", r"\frac{11}{2}"),
    ("0.333", "1/3"),
    ("0.5", "50%"),
    ("1e3", "1000"),
    ("nan", "0"),
    ("9" * 5000, "9"),
    ("9" * 60, "9" * 59),
    ("x", "X"),
    ("$", "42"),
    ("42" + " " * 100_000, "42"),
]


@pytest.mark.parametrize(("found", "right"), EQUAL)
def test_equal_answers_however_they_are_written(found, right):
    assert boxed_answer(rf"So it is $\boxed{{{found}}}$.", right, {}) == 1.0


@pytest.mark.parametrize(("found", "right"), DIFFERENT)
def test_different_answers_however_alike_they_look(found, right):
    assert boxed_answer(rf"So it is $\boxed{{{found}}}$.", right, {}) == 0.0


REPLIES = [
    (r"\boxed{41} no, \boxed{42}", 1.0),
    (r"\boxed{42} no, \boxed{41}", 0.0),
    (" ".join(rf"\boxed{{{n}}}" for n in range(100)), 0.0),
    (r"\boxed{42} \boxed{", 1.0),
    (r"\boxed {42} and 7 lines of comment", 1.0),
    (r"\boxed{\boxed{42}}", 1.0),
    (r"} } \boxed{42}", 1.0),
    (r"{ \boxed{42}", 1.0),
    (r"\boxed{\{42\}}", 0.0),
    (r"\boxed{}", None),
    (r"\boxed{ } 42", None),
    ("The sum is 42.", 1.0),
    ("40 + 2 = **42**", 1.0),
    ("It costs $42", 1.0),
    ("from 42 to 41", 0.0),
    ("41, 42, 43", 0.0),
    ("84/2", 1.0),
    (r"$\frac{84}{2}$", 1.0),
    (r"$\frac{1}{42}$", 0.0),
    ("50-42", 1.0),
    ("(50)-42", 1.0),
    ("x = -42", 0.0),
    ("x^42", None),
    ("x^{42}", None),
    ("x_42 and v42 and 1.0.42", 0.0),
    ("I do not know", None),
    ("", None),
    ("<think>\\boxed{42}", None),
    ("<think>42</think>", None),
    ("<think>\\boxed{41}</think>It is 42", 1.0),
    ("<think>\\boxed{42}</think>It is 41", 0.0),
    ("\\boxed{41}</think>42", 1.0),
    ("</think>42</think>41", 0.0),
    ("</think>42<think>42", None),
]


@pytest.mark.parametrize(("completion", "reward"), REPLIES)
def test_the_last_answer_behind_the_reasoning_counts(completion, reward):
    assert boxed_answer(completion, "42", {}) == reward


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 20_000,
        r"\boxed{" * 20_000 + "}" * 20_000,
        r"\boxed{" + r"\text{" * 20_000 + "}",
        r"\boxed{\frac{" + "1" * 100_000 + "}{2}}",
        "1,111" * 30_000,
        "-" * 100_000,
        "1/" * 50_000,
        r"\boxed{" + "1 " * 50_000 + "}",
    ],
)
def test_no_text_takes_long_to_read(text):
    """A reply that outlasts `task.reward_timeout_s` would cost its whole group."""
    before = time.process_time()
    boxed_answer(text, "42", {})
    assert time.process_time() - before < 1.0


@pytest.mark.parametrize("gold", ["1,000", "1000.0", "$1000", "1\N{MINUS SIGN}0", "x + 1", r"\pi"])
def test_no_gold_answer_makes_the_reward_fail(gold):
    """A reward that raised on it would end this prompt's groups as reward_failed in every epoch."""
    assert boxed_answer(rf"\boxed{{{gold}}}", gold, {}) == 1.0
    assert boxed_answer("43", gold, {}) == 0.0


@pytest.mark.parametrize("gold", ["1,000", "1000.0", "$1000", " 1000 ", "+1000"])
def test_last_integer_reads_the_gold_answer_as_it_reads_completions(gold):
    assert last_integer("It is 1,000.", gold, {}) == 1.0
    assert last_integer("It is 999.", gold, {}) == 0.0


def test_last_integer_names_a_gold_answer_that_is_no_number():
    with pytest.raises(ValueError, match=r"the right answer 'x \+ 1' is no number"):
        last_integer("1", "x + 1", {})
