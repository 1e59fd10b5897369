"""Rewards that come with the package; each is a pure function of text.

Those that look for an answer read one, the last: a later answer replaces an earlier one, so that a
list of guesses earns no more than its last entry. Right answers are read as completions are.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

_LONGEST_NUMBER = 40
"""Digits; a longer run is a wrong answer, and costs no conversion."""
_LONGEST_ANSWER = 1000
"""Characters that an answer may have more than the right one; a longer one is wrong."""

_INTEGER = re.compile(r"(?<![\d.])-?\d+(?!\.?\d)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")

_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
_FRACTION = rf"\\[dt]?frac\s*\{{-?{_DECIMAL}\}}\s*\{{{_DECIMAL}\}}"
_SOME_NUMBER = re.compile(
    rf"(?<![\w.^/])(?<![\^_]\{{)(?:(?<![)\]}}])-)?(?:{_FRACTION}|{_DECIMAL}(?:/{_DECIMAL})?)"
)
"""Not the digit of x2, x_2, x^2, x^{2} or 1.0.2; a minus sign behind a term is an operator."""
_WHOLE_NUMBER = re.compile(r"[+-]?(?=\.?[0-9])(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]*)?")
_WHOLE_FRACTION = re.compile(r"([+-]?)\\frac\{([^{}]+)\}\{([^{}]+)\}")
_BRACE = re.compile(r"(\\boxed\s*\{)|\\[\s\S]|[{}]")

_SPACING = re.compile(
    r"\\[$%!,;: ]|[$%~\N{DEGREE SIGN}]|\\(?:left|right|displaystyle)(?![a-zA-Z])"
    r"|\^\{?\\circ\}?"
)
_OUTER_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_UNIT = re.compile(r"(?<=.)\\(?:text|mbox|mathrm)\{[^{}]*\}$")
_STYLE = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac([0-9])([0-9])")


def exact_match(completion: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """1 if the completion is the answer, white space around either aside."""
    del metadata
    return float(completion.strip() == answer.strip())


def last_integer(completion: str, answer: str, metadata: Mapping[str, Any]) -> float | None:
    """1 if the last integer of the completion equals the answer, else 0; None if it has none.

    Reads thousands separators and the Unicode minus sign. Decimals are not integers.

    Raises:
        ValueError: the answer is no number: `boxed_answer` compares any text.
    """
    del metadata
    right = _plain(answer)
    if not isinstance(right, Fraction):
        raise ValueError(f"the right answer {answer[:80]!r} is no number")
    text = _THOUSANDS.sub("", completion.replace("\N{MINUS SIGN}", "-"))
    # "12-5" is two positive numbers: a minus sign after a digit is an operator
    found = [match.group() for match in _INTEGER.finditer(re.sub(r"(?<=\d)-", " ", text))]
    if not found:
        return None
    if len(found[-1]) > _LONGEST_NUMBER:
        return 0.0
    return float(int(found[-1]) == right)


def boxed_answer(completion: str, answer: str, metadata: Mapping[str, Any]) -> float | None:
    r"""1 if the reply's last `\boxed{...}`, else its last number, is the answer; else 0.

    None if there is neither, or if the completion ends within its reasoning: only what follows
    `</think>` counts. Two answers are equal if they are the same number (1,000 = 1000.0 = $1000;
    \frac{1}{2} = 1/2 = 0.5; 50% = 50), or else the same text once spaces, \text{...}, dollar signs
    and what else only typesets them is removed. Needs no number: a right answer may be any text.
    """
    del metadata
    reply = completion.rpartition("</think>")[2]
    if "<think>" in reply:
        return None
    found = _last_box(reply)
    if found is None:
        numbers = _SOME_NUMBER.findall(_dashes(reply).replace("\\$", "").replace("$", ""))
        found = numbers[-1] if numbers else ""
    if not found.strip():
        return None
    if len(found) > len(answer) + _LONGEST_ANSWER:
        return 0.0
    return float(_plain(found) == _plain(_right_answer(answer)))


def _last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces are balanced; one pass, whatever is in it."""
    last: tuple[int, int] | None = None
    opened: list[int | None] = []  # where the content of a box begins; None: another brace
    for match in _BRACE.finditer(text):
        if match.group(1):
            opened.append(match.end())
        elif match.group() == "{":
            opened.append(None)
        elif match.group() == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[slice(*last)]


def _right_answer(answer: str) -> str:
    r"""The final answer of a data set's field: in its box, or behind GSM8K's `####`."""
    boxed = _last_box(answer)
    return answer.rpartition("####")[2] if boxed is None else boxed


def _plain(text: str) -> Fraction | str:
    """The number that `text` is, else `text` without what only typesets it."""
    text = _SPACING.sub("", _dashes(text).replace("{,}", ","))
    text = _OUTER_SPACE.sub("", text).removesuffix(".")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _STYLE.sub(r"\1", _UNIT.sub("", text))
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    number = _number(text)
    return text if number is None else number


def _number(text: str) -> Fraction | None:
    if fraction := _WHOLE_FRACTION.fullmatch(text):
        above, below = _decimal(fraction[1] + fraction[2]), _decimal(fraction[3])
    elif "/" in text:
        above, below = (_decimal(part) for part in text.split("/", 1))
    else:
        return _decimal(text)
    return above / below if above is not None and below else None


def _decimal(text: str) -> Fraction | None:
    if len(text) > _LONGEST_NUMBER or not _WHOLE_NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", "").removesuffix("."))


def _dashes(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-").replace("\N{EN DASH}", "-")
