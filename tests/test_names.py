"""Names of definitions say what they hold or do: one bare participle does not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "max"
IRREGULAR = {
    "alone", "between", "bound", "built", "chosen", "drawn", "found", "given", "held", "hidden", "kept", "known",
    "lacking", "left", "lost", "made", "meant", "need", "nothing", "only", "seen", "sent", "shown", "spent", "taken",
    "together", "written",
}  # fmt: skip
VERBS = {"embed", "need", "reseed", "seed"}
MOST = {
    "_interpreter": 0, "dtype": 0, "experimental": 5, "graph": 3, "kernel": 8, "mlir": 1, "nn": 5, "torch": 0,
}  # fmt: skip
"""The number of such definitions in each package; lower it when one is renamed."""


def bare_participles(package: str) -> list[str]:
    """The functions and classes of a package whose name is one participle or adverb."""
    found: list[str] = []
    for path in sorted((SRC / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = node.name.strip("_")
                if name in IRREGULAR or (re.fullmatch(r"[a-z]+ed", name) and name not in VERBS):
                    found.append(f"{path.relative_to(SRC)}:{node.lineno} {node.name}")
    return found


@pytest.mark.any_target
@pytest.mark.parametrize("package", sorted(MOST))
def test_names_are_more_than_a_participle(package: str) -> None:
    found = bare_participles(package)
    assert len(found) == MOST[package], "\n".join(found)
