"""Rules of the kernels' source: one signature a name, at most 100 lines a function, operands in records."""

from __future__ import annotations

import ast
from pathlib import Path

import max._backends.cpu.kernels

FOLDER = Path(max._backends.cpu.kernels.__file__).parent
MAX_LINES = 100
MAX_PARAMETERS = 11


def functions() -> list[tuple[Path, ast.FunctionDef]]:
    """All functions of the library, with kernels and lowerings."""
    return [
        (path, node)
        for path in sorted(FOLDER.rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]


def parameters(node: ast.FunctionDef) -> tuple[str, ...]:
    a = node.args
    return tuple(p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs))


def is_inline(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(d) in ("k.inline", "k.outlined") for d in node.decorator_list)


def is_kernel(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(d) == "k.kernel" for d in node.decorator_list)


def test_a_name_has_one_signature() -> None:
    signatures: dict[str, dict[tuple[str, ...], str]] = {}
    for path, node in functions():
        if is_inline(node):
            name = str(path.relative_to(FOLDER))
            signatures.setdefault(node.name, {}).setdefault(parameters(node), name)
    several = {name: list(s.values()) for name, s in signatures.items() if len(s) > 1}
    assert several == {}


def test_functions_have_at_most_100_lines() -> None:
    """Lines of comments do not count."""
    lengths = {}
    for path, node in functions():
        lines = path.read_text().splitlines()[node.lineno : node.end_lineno]
        code = [line for line in lines if not line.lstrip().startswith("#")]
        lengths[f"{path.relative_to(FOLDER)}: {node.name}"] = len(code)
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_kernels_and_inline_functions_take_records() -> None:
    counts = {
        f"{path.relative_to(FOLDER)}: {node.name}": len(parameters(node)) + bool(node.args.vararg)
        for path, node in functions()
        if is_inline(node) or is_kernel(node)
    }
    assert {name: n for name, n in counts.items() if n > MAX_PARAMETERS} == {}
