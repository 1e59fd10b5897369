"""Check numbers worked out elsewhere against this implementation: `check_vectors.py FILE`.

FILE is JSON: `{"vectors": [{"name", "inputs", "config", "expected"}]}`. A vector's name chooses
what is computed; every number comes from the file. Prints one line per vector (ok, FAIL with the
difference, skipped with a reason) and exits 1 on any FAIL or skip. Everything is float64.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import vector_enumerations
import vector_losses
import vector_values

TOLERANCE = 1e-9
GRADIENT_TOLERANCE = 1e-7
"""of central differences, unless the file names its own"""
PLANNER_TOLERANCE = 1e-3
MEASURED_GRADIENTS = ("grad_logp", "equals_tis_reinforce_grad")
"""by central differences; the others are exact"""

COMPUTE: dict[str, Any] = {
    **vector_values.COMPUTE,
    **vector_losses.COMPUTE,
    **vector_enumerations.COMPUTE,
}
"""vector name -> function of (inputs, config, names of the expected values) to their values"""


def main(argv: list[str] | None = None) -> int:
    """Check every vector of the file."""
    parser = argparse.ArgumentParser(description="Check test vectors in float64.")
    parser.add_argument("file", type=Path, metavar="FILE")
    content = json.loads(parser.parse_args(argv).file.read_text(encoding="utf-8"))
    allowed = (
        content.get("tolerance", TOLERANCE), content.get("grad_tolerance", GRADIENT_TOLERANCE)
    )  # fmt: skip
    outcomes: list[str] = []
    for vector in content["vectors"]:
        outcome, detail = check(vector, *allowed)
        outcomes.append(outcome)
        print(f"{outcome:8}{vector['name']}{detail and ': '}{detail}")
    print(", ".join(f"{outcomes.count(name)} {name}" for name in ("ok", "FAIL", "skipped")))
    if not outcomes:
        print("the file has no vector")
    return int(set(outcomes) != {"ok"})


def check(vector: Mapping[str, Any], values: float, gradients: float) -> tuple[str, str]:
    """(ok | FAIL | skipped, detail) of one vector; tolerances of values and of gradients."""
    name, expected = vector["name"], vector["expected"]
    compute = COMPUTE.get(name)
    if compute is None and name.startswith("planner_closed_form_"):
        compute = vector_enumerations.planner
    if compute is None:
        return "skipped", "no part of the implementation goes by this name"
    found = compute(vector["inputs"], vector["config"])
    if missing := sorted(expected.keys() - found.keys()):
        return "FAIL", f"nothing computes {', '.join(missing)}"
    if not expected:
        return "skipped", "nothing is expected"
    worst: list[str] = []
    for key, wanted in expected.items():
        allowed = gradients if key in MEASURED_GRADIENTS else values
        if name.startswith(("planner_", "emax_")):
            allowed = PLANNER_TOLERANCE
        worst += differences(key, wanted, found[key], allowed)
    return ("FAIL", "; ".join(worst[:3])) if worst else ("ok", "")


def differences(path: str, expected: Any, found: Any, allowed: float) -> Iterator[str]:
    """A line for each number that is not the same."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or expected.keys() != found.keys():
            yield f"{path}: expected {expected}, got {found}"
            return
        for key, value in expected.items():
            yield from differences(f"{path}.{key}", value, found[key], allowed)
    elif isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            yield f"{path}: expected {len(expected)} values, got {found}"
            return
        for position, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differences(f"{path}[{position}]", one, other, allowed)
    elif isinstance(expected, bool) or isinstance(found, bool):
        if expected is not found:
            yield f"{path}: expected {expected}, got {found}"
    else:
        wanted, actual = float(expected), float(found)  # also "inf" and "-inf"
        if not (wanted == actual or _close(wanted, actual, allowed)):
            yield f"{path}: expected {wanted!r}, got {actual!r}, off by {actual - wanted:.3g}"


def _close(wanted: float, actual: float, allowed: float) -> bool:
    if not (math.isfinite(wanted) and math.isfinite(actual)):
        return False
    return abs(wanted - actual) <= allowed * max(1.0, abs(wanted))


if __name__ == "__main__":
    sys.exit(main())
