"""Which staged op an op of a pass comes from."""

from __future__ import annotations

from xdsl.dialects.test import TestOp as PlainOp
from xdsl.ir import Region

from max import mlir
from max._compiler import mok
from max._compiler.locations import SourceLocations, number_ops, staged_op_of
from max.dtype import DType
from max.mlir import Block, TensorType, build, line_location
from max.mlir.builtin import UNKNOWN_LOC

VECTOR = TensorType.get(DType.float32, (4,))


def ops_of(*names: str) -> list[mlir.MoOp]:
    """Ops of one vector that is their block's argument."""
    block = Block(arg_types=[VECTOR])
    for name in names:
        block.add_op(build(name, [block.args[0]] * (1 + name.endswith("add"))))
    return [op for op in block.ops if isinstance(op, mlir.MoOp)]


def region(*ops: mlir.Operation) -> mlir.Operation:
    """An op without a location, of no dialect of ours, around others."""
    for op in ops:
        if op.parent is not None:
            op.detach()
    return PlainOp.create(regions=[Region(Block(list(ops)))])


def staged() -> mlir.ModuleOp:
    """A module with three ops in a graph."""
    vector = "!mo.tensor<[4], f32, cpu:0>"
    lines = [
        f"%y = mo.neg(%x) : ({vector}) -> {vector}",
        f"%z = mo.exp(%y) : ({vector}) -> {vector}",
        f"mo.output(%z) : ({vector}) -> ()",
    ]
    body = "\n".join(lines)
    return mok.parse(f"builtin.module {{ mo.graph @g(%x: {vector}) -> ({vector}) {{ {body} }} }}")


def test_each_op_has_its_number() -> None:
    module = staged()
    ops = list(mlir.walk(module))
    assert len(ops) >= 3 and {staged_op_of(op) for op in ops} == {-1}
    number_ops(module)
    assert [staged_op_of(op) for op in ops] == [*range(len(ops))]


def test_locations_of_files_have_no_number() -> None:
    (op,) = ops_of("mo.neg")
    op.location = line_location("model.py", 7)
    assert staged_op_of(op) == -1


def numbered(names: list[str], numbers: list[int | None]) -> list[mlir.MoOp]:
    """Ops with numbers; None: one has none."""
    module = staged()
    number_ops(module)
    location = next(iter(mlir.walk(module))).location
    assert isinstance(location, mlir.FileLineColLoc)
    filename = location.filename
    ops = ops_of(*names)
    for op, number in zip(ops, numbers, strict=True):
        op.location = line_location("model.py" if number is None else filename, number or 0)
    return ops


def test_a_region_takes_the_number_of_what_may_raise() -> None:
    """Its first op that can, else its last; 0 is a number, and ops of other dialects have none."""
    plain = numbered(["mo.neg", "mo.exp", "mo.neg"], [5, 0, 7])
    assert staged_op_of(region(*plain)) == 7
    assert staged_op_of(region(*numbered(["mo.neg", "mo.exp"], [0, None]))) == 0
    assert staged_op_of(region(*numbered(["mo.neg"], [None]))) == -1
    assert staged_op_of(region()) == -1
    inner = region(*numbered(["mo.neg"], [3]))
    assert staged_op_of(region(inner, *numbered(["mo.exp"], [4]))) == 4
    for raising in (0, 6):
        ops = numbered(["mo.exp", "mo.neg", "mo.neg", "mo.neg"], [2, raising, 8, 9])
        with_raising = [ops[0], gathered(ops[1]), gathered(ops[2]), ops[3]]
        assert staged_op_of(region(*with_raising)) == raising
    unnumbered = gathered(numbered(["mo.neg"], [None])[0])
    assert staged_op_of(region(unnumbered, *numbered(["mo.exp"], [4]))) == 4


def gathered(like: mlir.MoOp) -> mlir.MoOp:
    """An op that may raise, with the location of another one."""
    block = Block(arg_types=[VECTOR, TensorType.get(DType.int64, (2,))])
    op = build("mo.gather", block.args, {"axis": 0})
    assert op.spec.may_raise
    block.add_op(op)
    op.location = like.location
    return op


def test_texts_of_locations() -> None:
    """Lines, lines with a scope, texts of a saved program, and ops without any."""
    locations = SourceLocations(
        [line_location("a.py", 3), line_location("b.py", 4, "layer 1"), "c.py:5 [x [y]]", None, UNKNOWN_LOC,
         line_location("d.py", 6)]
    )  # fmt: skip
    texts = ["a.py:3", "b.py:4 [layer 1]", "c.py:5 [x [y]]", "", "", "d.py:6"]
    assert locations.texts() == texts
    assert [locations.describe(number) for number in (*range(6), 6, -1)] == [*texts, "", ""]
    assert [locations.scope(number) for number in range(6)] == ["", "layer 1", "x [y]", "", "", ""]
    module = staged()
    for line, op in enumerate(mlir.walk(module)):
        op.location = line_location("m.py", line)
    assert SourceLocations.of(module).texts()[:2] == ["m.py:0", "m.py:1"]
    assert SourceLocations().texts() == []
