"""Ops that passes make: bodies that do not fit their op are errors, and texts read back to the same module."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from xdsl.ir import Block
from xdsl.utils.exceptions import ParseError, VerifyException

from max import kernel as k
from max._backends.cpu.backend import cpu_backends
from max._compiler import mok
from max._compiler.passes.redundant_ops import drop_dead_ops, merge_equal_ops
from max._compiler.pipeline import optimize
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from max.mlir import DimExpr, OpSpec, build, clone_module, entry, print_module, resources, to_attr
from max.mlir.builtin import UNKNOWN_LOC
from max.mlir.conditions import Condition
from max.mlir.types import ChainType
from max.mlir.types import TensorType as MoTensor

X = "!mo.tensor<[4], f32, cpu:0>"
Y = "!mo.tensor<[4], f64, cpu:0>"
ELSEWHERE = "!mo.tensor<[4], f32, cpu:1>"
DEVICE, F32 = DeviceRef.CPU().to_mlir(), DType.float32


def module(body: str, op: str = "mok.region", result: str = X, kind: str = 'kind = "map"') -> str:
    attributes = f"{{{kind}}} " if op == "mok.region" else ""
    return (
        f"builtin.module {{ mo.graph @g(%x: {X}) -> ({result}) {{\n"
        f"%y = {op}(%x) {attributes}: ({X}) -> {result} {{\n{body}\n}}\n"
        f"mo.output(%y) : ({result}) -> () }} }}"
    )


def text_of(body: str, **options: str) -> str:
    parsed = mok.parse(module(body, **options))
    parsed.verify()
    return str(parsed)


ADD = f"%b = mo.add(%a, %a) : ({X}, {X}) -> {X}"


@pytest.mark.parametrize("op", ["mok.region", "mok.once"])
def test_a_body_reads_back(op: str) -> None:
    text = text_of(f"^body(%a: {X}):\n{ADD}\nmok.yield(%b) : ({X}) -> ()", op=op)
    again = mok.parse(text)
    again.verify()
    assert str(again) == text and "mok.yield" in text
    assert f": ({X}) -> {X} {{" in text
    (made,) = (each for each in entry(again).block.ops if isinstance(each, mok.BodyOp))
    assert not isinstance(made, mok.RegionOp) or made.kind == "map"


@pytest.mark.parametrize("op", ["mok.region", "mok.once"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"^body(%a: {Y}):\nmok.yield(%a) : ({Y}) -> ()", "arguments differ from the operands"),
        (
            f"^body(%a: {X}, %c: {X}):\nmok.yield(%a) : ({X}) -> ()",
            "arguments differ from the operands",
        ),
        (f"^body(%a: {X}):\nmo.output(%a) : ({X}) -> ()", "does not end with mok.yield"),
        (f"^body(%a: {X}):\n{ADD}", "is not a terminator"),
        (f"^body(%a: {X}):\n%b = mok.yield(%a) : ({X}) -> {X}", "mok.yield has 0 results"),
        (f"^body(%a: {X}):", "expects at least a terminator"),
        (f"^body(%a: {X}):\nmok.yield(%a, %a) : ({X}, {X}) -> ()", "yielded values differ"),
    ],
)
def test_a_body_that_does_not_fit(op: str, body: str, message: str) -> None:
    with pytest.raises(VerifyException, match=message):
        text_of(body, op=op)


@pytest.mark.parametrize("op", [mok.RegionOp, mok.OnceOp])
def test_a_body_uses_its_own_values_in_their_order(op: type[mok.BodyOp]) -> None:
    type_ = MoTensor.get(F32, [4], DEVICE)

    def body_of(use: str) -> mok.BodyOp:
        outside, body = Block(arg_types=[type_]), Block(arg_types=[type_])
        first = build("mo.exp", body.args)
        second = build(
            "mo.add", (first.results[0], (outside if use == "outside" else body).args[0])
        )
        body.add_ops([second, first] if use == "early" else [first, second])
        body.add_op(build(mok.YieldOp, second.results))
        attrs = {"kind": "map"} if op is mok.RegionOp else {}
        made = op.make(outside.args, [type_], body, attrs)
        outside.add_op(made)
        return made

    body_of("own").verify()
    for use in ("outside", "early"):
        with pytest.raises(
            VerifyException, match="outside the body, or one that is computed after"
        ):
            body_of(use).verify()


def test_a_region_states_its_kind() -> None:
    with pytest.raises(VerifyException, match="kind"):
        text_of(f"^body(%a: {X}):\nmok.yield(%a) : ({X}) -> ()", kind="")


@pytest.mark.parametrize("op", ["mok.region", "mok.once"])
def test_a_text_may_not_use_values_from_outside_a_body(op: str) -> None:
    with pytest.raises(VerifyException):
        text_of(f"^body(%a: {X}):\nmok.yield(%x) : ({X}) -> ()", op=op)


@pytest.mark.parametrize("op", [mok.RegionOp, mok.OnceOp])
def test_bodies_are_not_compared(op: type[mok.BodyOp]) -> None:
    """Two ops with equal operands and attributes may compute different values."""
    type_ = MoTensor.get(F32, [4], DEVICE)
    block = Block(arg_types=[type_])
    made: list[mok.BodyOp] = []
    for name in ("mo.exp", "mo.sin"):
        body = Block(arg_types=[type_])
        inner = build(name, body.args)
        body.add_ops([inner, build(mok.YieldOp, inner.results)])
        attrs = {"kind": "map"} if op is mok.RegionOp else {}
        made.append(op.make(block.args, [type_], body, attrs))
    block.add_ops([*made, build("mo.output", [one.results[0] for one in made])])
    merge_equal_ops(block)
    assert [*block.ops][:2] == made


@pytest.mark.parametrize("op", ["mok.region", "mok.once"])
def test_a_body_without_operands(op: str) -> None:
    constant = (
        f"%b = mo.constant() {{value = #mo.dense<f32, [4], [1.0, 2.0, 3.0, 4.0]>}} : () -> {X}"
    )
    text = module(f"^body:\n{constant}\nmok.yield(%b) : ({X}) -> ()", op=op)
    parsed = mok.parse(text.replace("(%x)", "()").replace(f": ({X}) -> {X} {{", f": () -> {X} {{"))
    parsed.verify()


@pytest.mark.parametrize("op", ["mok.region", "mok.once"])
def test_a_body_without_results(op: str) -> None:
    text = module(f"^body(%a: {X}):\nmok.yield() : () -> ()", op=op)
    text = text.replace("%y = ", "").replace(f": ({X}) -> {X} {{", f": ({X}) -> () {{")
    mok.parse(text.replace("mo.output(%y)", "mo.output(%x)")).verify()


def product(x: list[int], y: list[int], result: list[int], transpose: bool) -> str:
    types = [f"!mo.tensor<{sizes}, f32, cpu:0>" for sizes in (x, y, result)]
    return (
        f"builtin.module {{ mo.graph @g(%x: {types[0]}, %y: {types[1]}) -> ({types[2]}) {{\n"
        f"%z = mok.matmul(%x, %y) {{transpose_b = {str(transpose).lower()}}} : ({types[0]}, {types[1]}) -> {types[2]}\n"
        f"mo.output(%z) : ({types[2]}) -> () }} }}"
    )


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("batch", [[], [2]])
def test_the_last_two_axes_are_exchanged(transpose: bool, batch: list[int]) -> None:
    x, y, result = [*batch, 3, 5], [*batch, 5, 7], [*batch, 3, 7]
    other = [*batch, 7, 5]
    right, wrong = (other, y) if transpose else (y, other)
    mok.parse(product(x, right, result, transpose)).verify()
    with pytest.raises(VerifyException):
        mok.parse(product(x, wrong, result, transpose)).verify()
    with pytest.raises(VerifyException):
        mok.parse(product(x, right, [*batch, 7, 3], transpose)).verify()


@pytest.mark.parametrize("transpose", [False, True])
def test_products_of_what_does_not_fit(transpose: bool) -> None:
    y = [7, 5] if transpose else [5, 7]
    mok.parse(product([2, 3, 4, 5], [2, 3, *y], [2, 3, 4, 7], transpose)).verify()
    y = [3, *y]
    with pytest.raises(VerifyException):
        mok.parse(product([2, 4, 5], y, [2, 4, 7], transpose)).verify()
    text = product([4, 5], [7, 5], [4, 7], transpose)
    with pytest.raises(VerifyException, match="operand 1 is chain, expected a tensor"):
        mok.parse(text.replace("!mo.tensor<[7, 5], f32, cpu:0>", "!mo.chain")).verify()


class Products(mok.ProductsOp):
    """An op of a backend."""

    name = "mok.products"
    spec = OpSpec("mok.products", (0, 0), None, attributes={"pairs": tuple})


@pytest.mark.parametrize(
    ("products", "pairs", "parts"),
    [
        (3, [], [(0,), (1,), (2,)]), (2, [0], [(0, 1)]), (3, [0], [(0, 1), (2,)]), (3, [1], [(0,), (1, 2)]),
        (5, [1, 3], [(0,), (1, 2), (3, 4)]), (6, [0, 4], [(0, 1), (2,), (3,), (4, 5)]),
    ],
)  # fmt: skip
def test_parts_of_products(products: int, pairs: list[int], parts: list[tuple[int, ...]]) -> None:
    assert mok.parts_of(products, pairs) == parts
    op = Products.create(
        result_types=[MoTensor.get(F32, [4], DEVICE)] * products, attributes={"pairs": to_attr(pairs)}
    )  # fmt: skip
    assert op.parts == parts


@pytest.mark.parametrize(
    ("result", "fits"),
    [
        ("!mo.tensor<[4], f32, cpu:1>", True),
        (X, False),
        (Y, False),
        ("!mo.tensor<[4], f64, cpu:1>", False),
        ("!mo.tensor<[5], f32, cpu:1>", False),
    ],
)
def test_a_device_copy_changes_the_device_only(result: str, fits: bool) -> None:
    parsed = mok.parse(
        f"builtin.module {{ mo.graph @g(%x: {X}) -> ({result}) {{\n"
        f"%y = mok.device_copy(%x) : ({X}) -> {result}\nmo.output(%y) : ({result}) -> () }} }}"
    )
    if fits:
        parsed.verify()
        return
    with pytest.raises(VerifyException, match="device"):
        parsed.verify()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("%y = mok.device_copy() : () -> {x}", "takes 1 operands, got 0"),
        ("%y = mok.device_copy(%x, %x) : ({x}, {x}) -> {x}", "takes 1 operands, got 2"),
        ("%y, %z = mok.device_copy(%x) : ({x}) -> ({x}, {x})", "has 1 results, got 2"),
        ("mok.device_copy(%x) : ({x}) -> ()", "has 1 results, got 0"),
        ("mok.check(%x) {{{check}}} : ({x}) -> ()", "mok.check takes 0 operands, got 1"),
        ("%y = mok.check() {{{check}}} : () -> {x}", "mok.check has 0 results, got 1"),
        ('mok.check() {{message = "m"}} : () -> ()', "mok.check"),
        ("%y = mok.cast_within(%x, %x) : ({x}, {x}) -> {x}", "mok.cast_within takes 1 operands, got 2"),
        ("%y = mok.matmul(%x) {{transpose_b = false}} : ({x}) -> {x}", "mok.matmul takes 2 operands, got 1"),
        (
            "%y = mok.matmul(%x, %x, %x) {{transpose_b = false}} : ({x}, {x}, {x}) -> {x}",
            "mok.matmul takes 2 operands, got 3",
        ),
        ("mok.yield(%x) : ({x}) -> ()\nmo.output(%x) : ({x}) -> ()", "not the last op of its block"),
    ],
)  # fmt: skip
def test_ops_have_numbers_of_operands_and_results(text: str, message: str) -> None:
    check = 'sides = #mo.shape<[n, 5]>, exact = true, message = "m"'
    body = text.format(x=X, check=check)
    if "mo.output" not in body:
        body += f"\nmo.output(%x) : ({X}) -> ()"
    parsed = mok.parse(f"builtin.module {{ mo.graph @g(%x: {X}) -> ({X}) {{\n{body}\n}} }}")
    with pytest.raises(VerifyException, match=message):
        parsed.verify()


def test_equal_casts_are_one_and_equal_checks_are_kept() -> None:
    integers = X.replace("f32", "si32")
    check = 'mok.check() {sides = #mo.shape<[n, 5]>, exact = true, message = "m"} : () -> ()'
    lines = [
        check,
        check,
        f"%y = mok.cast_within(%x) : ({X}) -> {integers}",
        f"%z = mok.cast_within(%x) : ({X}) -> {integers}",
        f"%u = mok.device_copy(%x) : ({X}) -> {ELSEWHERE}",
        f"%v = mok.device_copy(%x) : ({X}) -> {ELSEWHERE}",
        f"mo.output(%y, %z, %u, %v) : ({integers}, {integers}, {ELSEWHERE}, {ELSEWHERE}) -> ()",
    ]
    results = f"({integers}, {integers}, {ELSEWHERE}, {ELSEWHERE})"
    parsed = mok.parse(
        f"builtin.module {{ mo.graph @g(%x: {X}) -> {results} {{\n" + "\n".join(lines) + "\n} }"
    )
    parsed.verify()
    block = entry(parsed).block
    merge_equal_ops(block)
    drop_dead_ops(block)
    names = [op.name for op in block.ops]
    assert names == ["mok.check"] * 2 + ["mok.cast_within", "mok.device_copy", "mo.output"]


def test_a_condition_is_that_of_its_check() -> None:
    n = DimExpr.symbol("n")
    for condition in (
        Condition.at_least(n, 5, "slice: short"), Condition.equal(n, n * 2, "add: other"),
    ):  # fmt: skip
        check = mok.CheckOp.of(condition, UNKNOWN_LOC)
        check.verify()
        assert check.condition == condition


Types = list[tuple[DType, list[int | str]]]


def attention(
    types: Types, axis: int, fills: Sequence[float | None], roundings: int | None = None
) -> mok.AttentionOp:
    """Attention over values of these types, with a result in float16."""
    made = [MoTensor.get(dtype, [DimExpr.of(d) for d in dims], DEVICE) for dtype, dims in types]
    rounded = [None] * (len(fills) + 2 if roundings is None else roundings)
    return mok.AttentionOp.of(
        Block(arg_types=made).args, 0.5, fills, rounded, axis, DType.float16, UNKNOWN_LOC, False
    )


def qkv(*masks: tuple[DType, list[int | str]], batch: Sequence[int] = (2, 3)) -> Types:
    shapes = ([*batch, 5, 8], [*batch, 7, 8], [*batch, 7, 6])
    return [*((F32, [*shape]) for shape in shapes), *masks]


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_the_type_and_the_operations_of_attention(batch: tuple[int, ...]) -> None:
    """Compared with the shapes of NumPy's results, and with the multiplications and additions of its loops."""
    q, keys, values = (np.zeros([int(d) for d in dims]) for _, dims in qkv(batch=batch))
    scores = q @ np.swapaxes(keys, -1, -2)
    result = scores @ values
    for axis in range(len(batch) + 1):
        masks = [(F32, list(scores.shape)), (DType.bool, [5, 1]), (F32, [7]), (F32, [1, 7])]
        op = attention(qkv(*masks, batch=batch), axis, [None, -1.0, None, None])
        (type_,) = op.result_types
        assert isinstance(type_, MoTensor) and type_.dtype is DType.float16
        assert type_.static_shape == np.moveaxis(result, -2, axis).shape
        assert op.spec.flops is not None
        count = op.spec.flops([v.type for v in op.operands], op.result_types)
        assert count.evaluate({}) == 2 * (scores.size * 8 + result.size * 7)
        op.verify()


@pytest.mark.parametrize(
    ("types", "axis", "fills", "message"),
    [
        ([(F32, [3, 5, 8]), (F32, [4, 7, 8]), (F32, [3, 7, 6])], 0, [], "the batch axes of"),
        ([(F32, [3, 5, 8]), (F32, [3, 7, 8]), (F32, [4, 7, 6])], 0, [], "the batch axes of"),
        ([(F32, [8]), (F32, [8]), (F32, [8])], 0, [], "the batch axes of"),
        ([(F32, [3, 5, 8]), (F32, [3, 7, 9]), (F32, [3, 7, 6])], 0, [], "the sizes of"),
        ([(F32, [3, 5, 8]), (F32, [3, 7, 8]), (F32, [3, 6, 6])], 0, [], "the sizes of"),
        ([(F32, [3, 5, 8]), (F32, [3, 8, 5]), (F32, [3, 8, 8])], 0, [], "the sizes of"),
        (qkv(), -1, [], "axis -1 of 2 batch axes"),
        (qkv(), 3, [], "axis 3 of 2 batch axes"),
        (qkv((F32, [7])), 0, [], "0 fills for 1 masks"),
        (qkv((F32, [6])), 0, [None], "does not spread over the scores"),
        (qkv((F32, [3, 1, 7])), 0, [None], None),
        (qkv((F32, [2, 1, 7])), 0, [None], "does not spread over the scores"),
        (qkv((F32, [1, 2, 3, 5, 7])), 0, [None], "does not spread over the scores"),
        (qkv((DType.bool, [7])), 0, [None], r"bool.* with the fill None"),
        (qkv((F32, [7])), 0, [0.0], "f32.* with the fill 0.0"),
    ],
)  # fmt: skip
def test_attention_that_does_not_fit(
    types: Types, axis: int, fills: list[float | None], message: str | None
) -> None:
    if message is None:
        attention(types, axis, fills)
        return
    with pytest.raises((ValueError, TypeError), match=message):
        attention(types, axis, fills)


@pytest.mark.parametrize("roundings", [1, 2, 3, 4])
def test_each_mask_has_a_rounding(roundings: int) -> None:
    if roundings == 3:
        attention(qkv((F32, [7])), 0, [None], roundings)
        return
    with pytest.raises(ValueError, match=f"{roundings} roundings, expected 3"):
        attention(qkv((F32, [7])), 0, [None], roundings)


def test_attention_of_what_is_no_tensor() -> None:
    types = [MoTensor.get(F32, [DimExpr.of(5), DimExpr.of(8)], DEVICE)] * 3
    attributes = {"axis": 0, "fills": (), "roundings": (None, None), "dtype": F32}
    infer = mok.AttentionOp.spec.infer
    assert infer is not None and list(infer(types, attributes)) == types[:1]
    with pytest.raises(TypeError, match="an operand is no tensor"):
        infer([*types, ChainType.get()], attributes)


def test_guards_of_attention() -> None:
    """Rows of NaN are 0, or those that are masked, or none; there is no other guard."""
    values = Block(arg_types=[MoTensor.get(F32, [DimExpr.of(5), DimExpr.of(8)], DEVICE)] * 3).args
    for guard in ("", "nan", "masked"):
        op = mok.AttentionOp.of(values, 0.5, (), (None, None), 0, F32, UNKNOWN_LOC, guard)
        assert op.attr_or("guard", "") == guard
    with pytest.raises(ValueError, match="guard is 'rows', expected 'nan' or 'masked'"):
        mok.AttentionOp.of(values, 0.5, (), (None, None), 0, F32, UNKNOWN_LOC, "rows")


def test_copies_between_devices() -> None:
    here = MoTensor.get(F32, [DimExpr.of(4)], DEVICE)
    there = MoTensor.get(F32, [DimExpr.of(4)], DeviceRef.CPU(1).to_mlir())
    (x,) = Block(arg_types=[here]).args
    copy = mok.DeviceCopyOp.of(x, there, UNKNOWN_LOC)
    copy.verify()
    assert [*copy.operands] == [x] and [*copy.result_types] == [there]


def test_texts_of_attention_are_checked() -> None:
    types = ["!mo.tensor<[5, 8], f32, cpu:0>"] * 3
    attributes = "scale = 1.0 : f64, fills = [], roundings = [unit, unit], axis = 0 : i64, dtype = #mo.dtype<f32>"

    def text(operands: list[str], results: list[str]) -> str:
        names = ", ".join("%x" for _ in operands)
        made = ", ".join(f"%y{i}" for i in range(len(results)))
        return (
            f"builtin.module {{ mo.graph @g(%x: {types[0]}) -> ({types[0]}) {{\n"
            + (f"{made} = " if made else "")
            + f"mok.attention({names}) {{{attributes}}} : ({', '.join(operands)}) -> ({', '.join(results)})\n"
            f"mo.output(%x) : ({types[0]}) -> () }} }}"
        )

    right = mok.parse(text(types, types[:1]))
    right.verify()
    again = mok.parse(print_module(right))
    assert again.is_structurally_equivalent(right)
    for operands, results, message in (
        (types[:2], types[:1], "takes at least 3 operands, got 2"),
        (types, [], "has 1 results, got 0"),
        (types, types[:2], "has 1 results, got 2"),
        (types, [X], "the result types are"),
    ):
        with pytest.raises(VerifyException, match=message):
            mok.parse(text(operands, results)).verify()


def test_the_text_of_a_large_constant_needs_its_array() -> None:
    weights = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    with Graph("g", input_types=[TensorType(F32, [3, 64], DeviceRef.CPU())]) as graph:
        graph.output(graph.inputs[0].tensor @ ops.constant(weights, F32, DeviceRef.CPU()))
    module = graph.to_mlir()
    text, arrays = print_module(module), resources(module)
    assert arrays
    read = mok.parse(text, arrays)
    assert read.is_structurally_equivalent(module)
    for none in (None, {}):
        with pytest.raises(ParseError, match="resource"):
            mok.parse(text, none)
    # the ops that passes of a backend add are read back too
    packed = clone_module(module)
    optimize(packed, cpu_backends(k.host_target()))
    made = print_module(packed)
    assert "mok.pack" in made
    assert mok.parse(made, resources(packed)).is_structurally_equivalent(packed)
