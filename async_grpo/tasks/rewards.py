"""Rewards that tasks of this package use; each is a pure function of text."""

import re
from collections.abc import Mapping
from typing import Any

_INTEGER = re.compile(r"(?<![\d.])-?\d+(?!\.?\d)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_LONGEST_INTEGER = 40
"""Digits; a longer run is a wrong answer, and costs no conversion."""


def exact_match(completion: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """1 if the completion is the answer, white space around either aside."""
    del metadata
    return float(completion.strip() == answer.strip())


def last_integer(completion: str, answer: str, metadata: Mapping[str, Any]) -> float | None:
    """1 if the last integer of the completion equals the answer, else 0; None if it has none.

    Reads thousands separators and the Unicode minus sign. Decimals are not integers.
    """
    del metadata
    text = _THOUSANDS.sub("", completion.replace("\N{MINUS SIGN}", "-"))
    # "12-5" is two positive numbers: a minus sign after a digit is an operator
    found = [match.group() for match in _INTEGER.finditer(re.sub(r"(?<=\d)-", " ", text))]
    if not found:
        return None
    if len(found[-1]) > _LONGEST_INTEGER:
        return 0.0
    return float(int(found[-1]) == int(answer))
