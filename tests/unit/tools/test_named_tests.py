"""Pages that name tests name tests that exist."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def all_tests() -> set[str]:
    files = (REPOSITORY / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}


@pytest.mark.parametrize("page", ["sglang.md"])
def test_a_page_names_tests_that_exist(page: str, all_tests: set[str]) -> None:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named
    assert named <= all_tests, sorted(named - all_tests)
