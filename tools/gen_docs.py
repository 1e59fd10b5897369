"""Write docs/configuration.md and docs/metrics.md from the source: `gen_docs.py [--check]`.

A field's docstring in `async_grpo/config/*.py` is its documentation; a metric's row in
`async_grpo/metrics/registry.py` is its. With --check nothing is written and the exit code is 1 if
a page is not current.
"""

import argparse
import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

from async_grpo.config.schema import Config
from async_grpo.metrics.registry import BUCKET_NAMES, METRICS

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- Written by tools/gen_docs.py; edit the source instead. -->"


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description="Generate the reference pages.")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    pages = {"configuration.md": configuration_page(), "metrics.md": metrics_page()}
    stale = []
    for name, text in pages.items():
        path = DOCS / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not args.check:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'not current, run tools/gen_docs.py' if args.check else 'wrote'}: {stale}")
    return int(args.check and bool(stale))


def configuration_page() -> str:
    """Every section, every field."""
    lines = [NOTE, "", "# Configuration", ""]
    lines += [
        "YAML, one mapping per section; `key=value` arguments with dotted keys win over the file. "
        "A key that is not here is refused. `${section.field}` stands for another field's value. "
        "`async-grpo check CONFIG` prints the resolved configuration, what follows from it, and "
        "every problem at once.",
        "",
    ]
    for section in fields(Config):
        schema: Any = section.type
        module = inspect.getmodule(schema)
        lines += [f"## `{section.name}`", "", first_paragraph(schema.__doc__), ""]
        lines += ["| field | default | meaning |", "|---|---|---|"]
        documented = field_docstrings(inspect.getsource(module), schema.__name__)  # type: ignore[arg-type]  # a class always has one
        for field in fields(schema):
            default = field_default(field)
            lines.append(f"| `{field.name}` | {default} | {cell(documented[field.name])} |")
        lines.append("")
    return "\n".join(lines)


def metrics_page() -> str:
    """Every metric."""
    lines = [NOTE, "", "# Metrics", ""]
    buckets = ", ".join(BUCKET_NAMES)
    lines += [
        "One line per train step in `metrics.jsonl`; the same names in TensorBoard. What is not a "
        "number, such as a mean over nothing, is left out.",
        "",
        "Each metric with a * is also there for every range of staleness that has tokens, as "
        f"`by_staleness/RANGE/NAME` with RANGE of {buckets}, and how many tokens, as "
        "`by_staleness/RANGE/tokens`. Figures of tokens are over the tokens of that staleness; "
        "figures of sequences (`*sequence*`, `perplexity/*`) over the sequences whose oldest "
        "trained token is of it.",
        "",
    ]
    lines += ["| name | | unit | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{metric.name}` | {'*' * metric.by_staleness} | {metric.unit} | "
        f"{cell(metric.meaning)} |"
        for metric in METRICS.values()
        if not metric.name.startswith("by_staleness/")
    ]
    return "\n".join([*lines, ""])


def field_docstrings(source: str, class_name: str) -> dict[str, str]:
    """Field -> the string that follows it."""
    return dict(_docstrings(ast.parse(source), class_name))


def _docstrings(tree: ast.Module, class_name: str) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if not (isinstance(node, ast.ClassDef) and node.name == class_name):
            continue
        for here, after in zip(node.body, node.body[1:], strict=False):
            match here, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    yield name, inspect.cleandoc(text)


def field_default(field: Any) -> str:
    """The default as it is written in YAML."""
    if field.default is MISSING and field.default_factory is MISSING:
        return "required"
    value = field.default if field.default_factory is MISSING else field.default_factory()
    match value:
        case None:
            return "`null`"
        case bool():
            return f"`{str(value).lower()}`"
        case Enum():
            return f"`{value.name}`"
        case "":
            return "empty"
        case _:
            return f"`{value}`"


def first_paragraph(text: str | None) -> str:
    """Up to the first empty line."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def cell(text: str) -> str:
    """`text` on one line, safe in a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
