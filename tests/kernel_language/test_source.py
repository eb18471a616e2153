"""The syntax tree of a function, parsed by itself or with its file, against that of the whole file."""

from __future__ import annotations

import ast
import linecache
import types
from pathlib import Path

import pytest

from max import kernel as k
from max.kernel.errors import KernelError
from max.kernel.language import source

SRC = Path(source.__file__).parents[2]

AWKWARD = '''"""A file."""
import functools

def last_line_of_a_body(x):
    return x

def closing_bracket(
    x,
    y=(
1,
),
) -> None:
    return (x,
y)

@functools.cache
@functools.lru_cache(
    maxsize=2
)
def decorated(x):
    # a comment

# at the left
    return x

def text(x):
    """Lines at the left:
def decorated(x):
    return 2
# end
x = 1
"""
    return x

def continued(x):
    return x + \\
1

class Holder:
    def method(self):
        return 3

def outer():
    @functools.cache
    def inner():
        return 4

    return inner
if outer:
    def conditional(): return 5
def one(): return 6; x = 7
def two(): return 8
@functools.cache
def end(x):
    return x'''


def places(text: str) -> list[tuple[int, ast.FunctionDef]]:
    """The functions of a file, each with the line that Python says it starts on."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return [(min([n.lineno, *(d.lineno for d in n.decorator_list)]), n) for n in nodes]


def test_each_function_of_an_awkward_file() -> None:
    found = places(AWKWARD)
    assert len(found) == 12
    for line, node in found:
        got = source._function_at("awkward.py", AWKWARD, line)
        assert got is not None
        assert ast.dump(got, include_attributes=True) == ast.dump(node, include_attributes=True)


@pytest.mark.parametrize(
    "name", ["kernel/language/mathlib.py", "_backends/cpu/kernels/products/dense/gemm.py"]
)
def test_functions_of_the_library(name: str) -> None:
    text = (SRC / name).read_text()
    for line, node in places(text):
        got = source._function_at(name, text, line)
        assert got is not None
        assert ast.dump(got, include_attributes=True) == ast.dump(node, include_attributes=True)


def test_a_function_is_parsed_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def first(x):\n    return x\n\n@a\n@b\ndef second(\n x\n) -> None:\n    y\n# a\n\n    return x\nz = 1\n"
    monkeypatch.setattr(source, "_functions_of_file", None)
    node = source._function_at("alone.py", text, 4)
    assert node is not None and (node.name, node.lineno, node.end_lineno) == ("second", 6, 12)
    assert len(node.decorator_list) == 2


@pytest.mark.parametrize(
    "changed",
    ["", "@", "@cache\n", "x = 1\n", "def f(", "def g(x):\n    return x\n", "    return x\n"],
)
def test_a_file_that_changed(changed: str) -> None:
    """Its lines are others than those that Python compiled."""
    file = "<changed>"
    scope: dict[str, types.FunctionType] = {}
    exec(compile("def f(x):\n    return x\n", file, "exec"), scope)
    linecache.cache[file] = (len(changed), None, changed.splitlines(keepends=True), file)
    try:
        with pytest.raises((KernelError, SyntaxError)):
            _ = k.kernel(scope["f"]).source
    finally:
        del linecache.cache[file]
