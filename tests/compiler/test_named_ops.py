"""Passes ask an op for its properties: the number of op names that stand in the files of the compiler does not grow."""

from __future__ import annotations

import ast
from pathlib import Path

from max._compiler.mok import MOK
from max.mlir import OPS

SRC = Path(__file__).parents[2] / "src" / "max"
COMPILER = SRC / "_compiler"
NAMES = {*OPS, *(op.name for op in MOK.operations)}

NAMED = {
    "analysis/shapes.py": (5, "the layout of each view"),
    "lowering/flops.py": (1, "a cast counts nothing"),
    "lowering/graph_lowering.py": (17, "ops that no kernel of a library carries out: the method of each"),
    "lowering/region_lowering.py": (1, "a result that is written to its part of a concat"),
    "lowering/region_specs.py": (11, "what each op of a region computes"),
    "mok/bodies.py": (1, "the end of a body"),
    "mok/products.py": (1, "the product that one with a transposed weight extends"),
    "passes/attention.py": (24, "the pattern of attention"),
    "passes/base.py": (1, "the elements of a constant"),
    "passes/canonicalize.py": (22, "the rule of each op"),
    "passes/collectives.py": (3, "the two collectives"),
    "passes/constants.py": (24, "the NumPy function of each op that is folded"),
    "passes/fuse.py": (1, "the norm before a product"),
    "passes/materialize.py": (1, "attention reads strided operands of some layouts"),
    "passes/place.py": (2, "a transfer becomes a copy, and a predicate stays in place"),
    "passes/redundant_ops.py": (1, "the load of a buffer"),
    "passes/resolve.py": (2, "the ops whose results introduce sizes"),
    "passes/split.py": (2, "the pattern of rotated halves"),
    "passes/views.py": (1, "a broadcast moves before cheap ops only"),
}  # fmt: skip
"""For each file the number of op names in it, with what they are for."""


def creates_or_defines(node: ast.AST) -> list[ast.expr]:
    """The expressions in a node that name an op to create it, or to define it."""
    match node:
        case ast.Call(func=ast.Name("build" | "OpSpec") | ast.Attribute(attr="_insert")):
            return node.args[:1]
        case ast.Assign(targets=[ast.Name("name")], value=value):
            return [value]
        case _:
            return []


def named_ops(text: str) -> list[str]:
    """The op names in a source text that compare, look up or list ops."""
    nodes = list(ast.walk(ast.parse(text)))
    left_out = {id(part) for node in nodes for part in creates_or_defines(node)}
    return [
        str(node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and node.value in NAMES and id(node) not in left_out
    ]


def test_no_file_of_the_compiler_names_more_ops() -> None:
    found = {
        path.relative_to(COMPILER).as_posix(): len(names)
        for path in sorted(COMPILER.rglob("*.py"))
        if (names := named_ops(path.read_text()))
    }
    expected = {name: count for name, (count, _) in NAMED.items()}
    assert found == expected, (
        "a property of ops belongs into their OpSpec; where a file names fewer ops than before, "
        "lower its number here"
    )


def test_names_are_counted_where_they_compare_or_list_ops() -> None:
    text = """
class AOp(MoOp):
    name = "mok.pack"
    spec = OpSpec("mok.pack", (1, 1), 1)
def f(op):
    if op.name in ("mo.add", "mo.mul") or op.name == "mo.cast":
        return build("mo.reshape", (op,), {"x": "mo.exp"})
    return producer(op, "mo.transpose"), "mo.no such op", "a text that says mo.add"
"""
    assert sorted(named_ops(text)) == ["mo.add", "mo.cast", "mo.exp", "mo.mul", "mo.transpose"]
