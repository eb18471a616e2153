"""The tables of docs/dialect.md, made from the specifications of the ops.

``python docs/_site/dialect.py`` writes them behind the line `MARK` of the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from max.mlir import OPS
from max.mlir.operation import OpSpec

PAGE = Path(__file__).parents[1] / "dialect.md"
MARK = "<!-- The rest is made from the specifications: python docs/_site/dialect.py -->"
FUNCTIONS = {"mo.graph", "mo.subgraph"}
"""Ops that the text before the tables describes."""
TRAITS = [
    field.name
    for field in fields(OpSpec)
    if field.type == "bool" and field.default is False and field.name != "elementwise"
]
"""The properties of an op that its row lists; most ops have none of them."""


def families() -> dict[str, list[OpSpec]]:
    """The ops of each module, in the order in which they are defined."""
    found: dict[str, list[OpSpec]] = {}
    for name, cls in OPS.items():
        # a dialect of a backend, or of a test, is no part of the page
        if name not in FUNCTIONS and cls.__module__.startswith("max.mlir.ops."):
            found.setdefault(cls.__module__, []).append(cls.spec)
    return found


def attributes(spec: OpSpec) -> str:
    """The attributes with their types; optional ones in brackets."""
    required = [f"`{name}`: {kind(expected)}" for name, expected in spec.attributes.items()]
    return ", ".join(
        [*required, *(f"[`{name}`: {kind(expected)}]" for name, expected in spec.optional.items())]
    )


def kind(expected: Any) -> str:
    kinds = expected if isinstance(expected, tuple) else (expected,)
    return " or ".join(item.__name__ for item in kinds)


def operands(spec: OpSpec) -> str:
    """The operands as the specification states them; of declared ones at least the names."""
    names = [operand.name for operand in spec.signature]
    text = spec.takes or ", ".join([*names, *(["chain"] if spec.chained else [])])
    return text.replace("|", "\\|")


def results(spec: OpSpec) -> str:
    if spec.gives:
        return spec.gives
    return "any number" if spec.results is None else str(spec.results)


def properties(spec: OpSpec) -> str:
    """What passes ask the op for, and whether sizes are checked when it runs."""
    names = ["elementwise"] if spec.elementwise else []
    names += [name for name in TRAITS if getattr(spec, name)]
    names += [] if spec.pure or spec.terminator else ["not pure"]
    names += [f"size_rule {spec.size_rule}"] if spec.size_rule else []
    names += ["conditions"] if spec.conditions is not None else []
    return ", ".join(names)


def rows(specs: Iterable[OpSpec]) -> list[str]:
    """The rows of a table; ops that differ in nothing but their names share one."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for spec in specs:
        cells = (
            operands(spec), attributes(spec), results(spec), spec.doc.replace("|", "\\|"), properties(spec),
        )  # fmt: skip
        merged.setdefault(cells, []).append(spec.name)
    return [
        f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(cells)} |"
        for cells, names in merged.items()
    ]


def tables() -> str:
    """The tables of all families."""
    lines: list[str] = []
    for module, specs in families().items():
        title = (sys.modules[module].__doc__ or module).split("\n")[0].rstrip(".").split(": ")[0]
        lines += [f"### {title}", ""]
        lines += [
            "| op | operands | attributes | results | meaning | properties |",
            "|---|---|---|---|---|---|",
        ]
        lines += [*rows(specs), ""]
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with new tables.

    Args:
        text: The page; what is before `MARK` stays.

    Raises:
        ValueError: It has no such line.
    """
    before, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE.name} has no line {MARK!r}")
    return f"{before}{MARK}\n\n{tables()}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
