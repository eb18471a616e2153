"""Passes ask an op for its properties: how often the files of the compiler name one op does not grow."""

from __future__ import annotations

import ast
from pathlib import Path

from max._backends.cpu.passes import int8_filters, packed_filters, packed_ops, winograd_ops
from max._compiler.mok import MOK
from max.mlir import OPS

SRC = Path(__file__).parents[2] / "src" / "max"
PACKED = [
    op.name
    for module in (int8_filters, packed_filters, packed_ops, winograd_ops)
    for op in vars(module).values()
    if hasattr(op, "spec")
]
NAMES = {*OPS, *PACKED, *(op.name for op in MOK.operations)}
QUOTED = {"mok/bodies.py": ["mok.yield"]}
"""The base class of ops with a body is defined before the op that ends one."""

NAMED = {
    "analysis/bounds.py": (14, "the bounds of each op's results, and which of them are rounded"),
    "analysis/shapes.py": (5, "the layout of each view"),
    "lowering/flops.py": (1, "a cast counts nothing"),
    "lowering/graph_lowering.py": (14, "ops that no kernel of a library carries out: the method of each"),
    "lowering/library_lowering.py": (1, "the name under which libraries have a product"),
    "lowering/region_lowering.py": (1, "a result that is written to its part of a concat"),
    "lowering/region_specs.py": (7, "what each op of a region computes"),
    "mok/__init__.py": (1, "the cast that one to integers that hold its operand extends"),
    "mok/products.py": (1, "the product that one with a transposed weight extends"),
    "passes/adapted_products.py": (3, "the terms that are added to a product, and the cast between"),
    "passes/attention.py": (23, "the pattern of attention"),
    "passes/attention_guards.py": (6, "the selects of 0 for rows of its probabilities"),
    "passes/base.py": (1, "the elements of a constant"),
    "passes/canonicalize.py": (23, "the rule of each op"),
    "passes/codes.py": (20, "codes that are rounded, clipped and widened, and what the sign of a zero reaches"),
    "passes/collectives.py": (3, "the two collectives"),
    "passes/constants.py": (24, "the NumPy function of each op that is folded"),
    "passes/fuse.py": (1, "the norm before a product"),
    "passes/int8_filters.py": (2, "a convolution of codes, and the forms that replace it"),
    "passes/pack.py": (8, "filters and quantized weights are packed in their own ways"),
    "passes/pack_experts.py": (3, "the two products of experts"),
    "passes/packed_filters.py": (2, "the convolution that one with packed filters extends"),
    "passes/place.py": (2, "a transfer becomes a copy, and a predicate stays in place"),
    "passes/redundant_ops.py": (1, "the load of a buffer"),
    "passes/resolve.py": (2, "the ops whose results introduce sizes"),
    "passes/channels.py": (14, "how axes of concats, slices, paddings, reshapes, broadcasts move; what a constant is"),
    "passes/split.py": (2, "the pattern of rotated halves"),
    "passes/views.py": (1, "a broadcast moves before cheap ops only"),
}  # fmt: skip
"""For each file how often it names an op of `mo` by its class, other than to create it, and what for."""

CLASSES = {cls.__name__ for cls in OPS.values()}


def created(node: ast.AST) -> list[ast.expr]:
    """The expressions in a node that name an op to create it, or to define it."""
    match node:
        case ast.Call(func=ast.Name("build" | "OpSpec") | ast.Attribute(attr="_insert")):
            return node.args[:1]
        case ast.Assign(targets=[ast.Name("name")], value=value):
            return [value]
        case _:
            return []


def named_ops(text: str) -> tuple[list[str], int]:
    """The quoted op names in a source text, and how often it uses a class of an op; without those of created ops."""
    nodes = list(ast.walk(ast.parse(text)))
    left_out = {id(part) for node in nodes for part in created(node)}
    rest = [node for node in nodes if id(node) not in left_out]
    imported = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("max.mlir.ops")
        for alias in node.names
    }
    uses = [node for node in rest if isinstance(node, ast.Name) and node.id in imported & CLASSES]
    uses += [
        node
        for node in rest
        if isinstance(node, ast.Attribute)
        and node.attr in CLASSES
        and isinstance(node.value, ast.Name)
        and node.value.id in imported
    ]
    quoted = [
        str(node.value) for node in rest if isinstance(node, ast.Constant) and node.value in NAMES
    ]
    return quoted, len(uses)


def sources() -> dict[str, str]:
    """The files of the compiler and of the CPU's passes."""
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for root in (SRC / "_compiler", SRC / "_backends/cpu")
        for path in sorted(root.rglob("*.py"))
        if "kernels" not in path.parts
    }


def test_no_file_names_an_op_by_a_string() -> None:
    """A misspelt class is an error of the import, a misspelt string is a pattern that never matches."""
    quoted = {name: named_ops(text)[0] for name, text in sources().items()}
    assert {name: names for name, names in quoted.items() if names} == QUOTED


def test_no_file_of_the_compiler_names_more_ops() -> None:
    found = {name: count for name, text in sources().items() if (count := named_ops(text)[1])}
    expected = {name: count for name, (count, _) in NAMED.items()}
    assert found == expected, (
        "a property of ops belongs into their OpSpec; where a file names fewer ops than before, "
        "lower its number here"
    )


def test_names_are_counted_where_they_compare_or_list_ops() -> None:
    text = """
from max.mlir.ops import shape as shape_ops
from max.mlir.ops.elementwise import AddOp, CastOp, MulOp
class AOp(MoOp):
    name = "mok.pack"
    spec = OpSpec("mok.pack", (1, 1), 1)
def f(op):
    if type(op) in (AddOp, MulOp) or op.name == "mo.cast" or type(op) is shape_ops.ReshapeOp:
        return build("mo.reshape", (build(CastOp, (op,)),), {"x": "mo.exp"})
    return producer(op, AddOp), "mo.no such op", "a text that says mo.add", OtherOp
"""
    quoted, uses = named_ops(text)
    assert sorted(quoted) == ["mo.cast", "mo.exp"] and uses == 4
