"""Pages that name tests name tests that exist, and every fault has a test or a reason.

Names are looked up in the source, so parameters in brackets are not checked.
"""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PAGES = [REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "README.md"]
PAGES += sorted((REPOSITORY / "docs").glob("*.md"))
FAULTS = ["sglang.md", "faults.md"]
DEFINITION = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
FAULT_ROW = re.compile(r"^\| (?:B\d{3}|\d{1,2}) \|.*\| (.*) \|$", re.MULTILINE)
"""Its last cell."""
REASON = re.compile(r"the same$|none: |all of `tests")


@pytest.fixture(scope="module")
def all_tests() -> set[str]:
    files = (REPOSITORY / "tests").rglob("test_*.py")
    return {name for file in files for name in DEFINITION.findall(file.read_text())}


@pytest.fixture(scope="module")
def all_files() -> set[str]:
    """Every tail of every path: pages may name `test_x.py` or `tests/unit/test_x.py`."""
    found = set()
    for file in (REPOSITORY / "tests").rglob("test_*.py"):
        parts = file.relative_to(REPOSITORY).parts
        found |= {"/".join(parts[start:]) for start in range(len(parts))}
    return found


def named_in(text: str) -> set[str]:
    """Names of tests; those that end in "..." stand for all that begin so."""
    return set(re.findall(r"`(test_\w+(?:\.\.\.)?)(?:\[[^`]*\])?`", text))


def missing(names: set[str], tests: set[str]) -> list[str]:
    def exists(name: str) -> bool:
        if name.endswith("..."):
            return any(test.startswith(name.removesuffix("...")) for test in tests)
        return name in tests

    return sorted(name for name in names if not exists(name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_tests_that_exist(
    page: Path, all_tests: set[str], all_files: set[str]
) -> None:
    text = page.read_text(encoding="utf-8")
    assert missing(named_in(text), all_tests) == []
    files = set(re.findall(r"`((?:\w+/)*test_\w+\.py)`", text))
    assert files <= all_files, sorted(files - all_files)
    for keyword in re.findall(r"`pytest -k (\w+)`", text):
        assert any(keyword in test for test in all_tests), keyword
    mutants = (REPOSITORY / "tests/simulation/mutants.py").read_text()
    for mutant in re.findall(r"mutant `(\w+)`", text):
        assert f"class {mutant}(" in mutants, mutant


def test_a_name_that_does_not_exist_is_found() -> None:
    text = "`test_a`, `test_b012_...`, `test_c[x=1...]`, `test_d`, `test_e_...`, `test_f.py`"
    assert missing(named_in(text), {"test_a", "test_b012_x", "test_c"}) == ["test_d", "test_e_..."]


@pytest.mark.parametrize("page", FAULTS)
def test_every_fault_has_a_test_or_a_reason(page: str) -> None:
    cells = FAULT_ROW.findall((REPOSITORY / "docs" / page).read_text(encoding="utf-8"))
    assert len(cells) > 20
    assert [cell for cell in cells if not named_in(cell) and not REASON.match(cell)] == []


def test_every_numbered_test_is_in_a_page(all_tests: set[str]) -> None:
    text = "".join((REPOSITORY / "docs" / page).read_text(encoding="utf-8") for page in FAULTS)
    listed = set(re.findall(r"^\| (B\d{3}) \|", text, re.MULTILINE))
    numbered = {
        f"B{number}"
        for test in all_tests
        for number in re.findall(r"(?<=_b)\d{3}(?=_)", test)
    }  # fmt: skip
    assert numbered <= listed, sorted(numbered - listed)
