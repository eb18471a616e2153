"""Modules: text, constants, verification."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from xdsl.utils.exceptions import VerifyException

from max import mlir
from max.dtype import DType
from max.mlir.attributes import from_attr, to_attr
from max.mlir.builtin import StringAttr
from max.mlir.types import dtype_from_text, dtype_text

GOLDEN = Path(__file__).parents[1] / "golden"


def module_of(body: str) -> mlir.ModuleOp:
    return mlir.parse_module(f"builtin.module {{\n{body}\n}}")


@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.name)
def test_dtype_names(dtype: DType) -> None:
    assert dtype_from_text(dtype_text(dtype)) is dtype


def test_unknown_dtype_name() -> None:
    with pytest.raises(ValueError, match="'f31' is not an element type; expected bool, si8"):
        dtype_from_text("f31")


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        0,
        -7,
        (1 << 63) - 1,
        1 << 63,
        0.5,
        1e-30,
        float("inf"),
        'a "quoted" name\n',
        "",
        DType.bfloat16,
        mlir.DimExpr("n") // 2 + 1,
        (1, 0, 2),
        (mlir.DimExpr("n"), mlir.DimExpr(3)),
        ("a", True, 2),
        {"x": 1, "y": "z"},
        None,
    ],
    ids=repr,
)
def test_attributes_both_ways_and_through_text(value: object) -> None:
    attr = to_attr(value)
    assert from_attr(attr) == value
    assert type(from_attr(attr)) is type(value)
    module = module_of(f"mo.graph @g() attributes {{x = {attr}}} {{ mo.output() : () -> () }}")
    assert from_attr(mlir.entry(module).attributes["x"]) == value


def test_negative_zero_and_nan_attributes_keep_their_bits() -> None:
    assert np.signbit(from_attr(to_attr(-0.0))) and not np.signbit(from_attr(to_attr(0.0)))
    assert np.isnan(from_attr(to_attr(float("nan"))))


def test_value_that_is_no_attribute() -> None:
    with pytest.raises(TypeError, match="object .* cannot be an attribute of an op"):
        to_attr(object())


CONSTANTS = [
    np.array(1.5, np.float32),
    np.array([0.1, -0.0, 1e-45, 3.4e38], np.float32),
    np.array([[np.nan, np.inf, -np.inf]], np.float32),
    np.array([0.1, 1e300, -5e-324]),
    np.array([0.1, 65504.0, np.nan], np.float16),
    np.array([0.1, 3e38, -np.inf], ml_dtypes.bfloat16),
    np.array([0.1, 448.0], ml_dtypes.float8_e4m3fn),
    np.array([[True], [False]]),
    np.array([-128, 127], np.int8),
    np.array([1 << 63], np.uint64),
    np.array([-(1 << 63)], np.int64),
    np.zeros((0, 3), np.float32),
]


@pytest.mark.parametrize("array", CONSTANTS, ids=lambda a: f"{a.dtype}-{a.shape}")
def test_small_constants_are_written_exactly(array: np.ndarray) -> None:
    attr = mlir.DenseAttr.of(array)
    module = module_of(f"mo.graph @g() attributes {{x = {attr}}} {{ mo.output() : () -> () }}")
    again = mlir.entry(module).attributes["x"]
    assert again == attr and hash(again) == hash(attr)
    found = from_attr(again)
    assert found.dtype == array.dtype and found.shape == array.shape
    assert found.tobytes() == array.tobytes()


def test_big_constants_are_resources() -> None:
    array = np.arange(1000, dtype=np.float32)
    type_ = mlir.TensorType.get(DType.float32, (1000,))
    op = mlir.build("mo.constant", (), {"value": mlir.constant_attr(array, "weights")}, (type_,))
    text = str(op)
    assert '#mo.resource<"weights">' in text and len(text) < 120
    assert op.attr("value") is array
    module = mlir.new_module()
    module.body.block.add_op(op)
    assert list(mlir.resources(module)) == ["weights"]
    again = mlir.parse_module(str(module), mlir.resources(module))
    assert again.is_structurally_equivalent(module)
    assert mlir.resources(again)["weights"] is array
    assert mlir.resources(mlir.clone_module(module))["weights"] is array


def test_missing_resource() -> None:
    text = 'builtin.module { %0 = mo.constant() {value = #mo.resource<"w">} : () -> !mo.chain }'
    with pytest.raises(mlir.ParseError, match='the constant "w" is a resource.*given: v'):
        mlir.parse_module(text, {"v": np.zeros(3)})


def test_types_through_text() -> None:
    types = [
        mlir.TensorType.get(DType.float32, ()),
        mlir.TensorType.get(DType.bfloat16, ("n", mlir.DimExpr("n") // 2 * 3, 4)),
        mlir.TensorType.get(DType.int8, (2,), mlir.DeviceRefAttr.get("gpu", 3), "RSCF"),
        mlir.BufferType.get(DType.uint8, ("pages", 0)),
        mlir.ChainType.get(),
        mlir.OpaqueType(("cache", ())),
        mlir.OpaqueType(("cache", (("dtype", to_attr(DType.int8)), ("n", to_attr(3))))),
    ]
    args = ", ".join(f"%{i}: {t}" for i, t in enumerate(types[:4] + types[5:] + types[4:5]))
    module = module_of(f"mo.graph @g({args}) {{ mo.output() : () -> () }}")
    assert list(mlir.entry(module).input_types) == types[:4] + types[5:] + types[4:5]
    tensor = types[1]
    assert isinstance(tensor, mlir.TensorType)
    assert tensor.as_buffer().as_tensor() is tensor
    assert tensor.short == "bf16[n, (n // 2) * 3, 4]"


def test_equal_types_are_one_object() -> None:
    assert mlir.TensorType.get(DType.float32, ("n", 4)) is mlir.TensorType.get(
        DType.float32, (mlir.DimExpr("n"), 4)
    )


def test_each_op_says_what_it_takes_and_does() -> None:
    """The reference of the dialect has no other source."""
    specs = [op.spec for op in mlir.OPS.values() if op.__module__.startswith("max.mlir.ops.")]
    assert len(specs) > 130
    functions = ("mo.graph", "mo.subgraph")
    assert [s.name for s in specs if not s.doc and s.name not in functions] == []
    assert [s.name for s in specs if not s.takes and s.operands[1] != 0 and s.doc] == []


INVALID = sorted((GOLDEN / "mo").glob("*_invalid.mlir"))
CHUNKS = [
    pytest.param(chunk, id=f"{path.stem}-{i}")
    for path in INVALID
    for i, chunk in enumerate(path.read_text().split("// -----"))
]
FAMILIES = [
    "buffer_invalid",
    "constant_invalid",
    "control_invalid",
    "elementwise_invalid",
    "gather_invalid",
    "matmul_invalid",
    "normalization_invalid",
    "reduction_invalid",
    "shape_invalid",
]


def test_every_family_has_invalid_ops() -> None:
    assert [path.stem for path in INVALID] == FAMILIES


@pytest.mark.parametrize("chunk", CHUNKS)
def test_invalid_op(chunk: str) -> None:
    match = re.search(r"// expected: (.*)\n", chunk)
    assert match is not None, "each chunk says what it expects"
    with pytest.raises((mlir.VerifyError, mlir.ParseError)) as error:
        mlir.verify_module(module_of(chunk))
    assert match[1].strip() in re.sub(r"\s+", " ", str(error.value))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mo.graph @g() { }", "mo.graph contains empty block"),
        ("", "a module has one mo.graph, this one has 0"),
        (
            "mo.graph @a() { mo.output() : () -> () } mo.graph @b() { mo.output() : () -> () }",
            "a module has one mo.graph, this one has 2",
        ),
        (
            "mo.subgraph @a() { mo.output() : () -> () } mo.graph @a() { mo.output() : () -> () }",
            "the module has two graphs @a",
        ),
        (
            "mo.graph @g() { %1 = mo.neg(%0) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[], f32, cpu:0> "
            "%0 = mo.neg(%1) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[], f32, cpu:0> "
            "mo.output() : () -> () }",
            "operand 0 of mo.neg in @g does not come before its use",
        ),
        (
            "mo.graph @g() { mo.output() : () -> () mo.chain_create() : () -> !mo.chain }",
            "mo.output is not the last op of its block",
        ),
    ],
)
def test_invalid_module(body: str, message: str) -> None:
    with pytest.raises((mlir.VerifyError, mlir.ParseError), match=message):
        mlir.verify_module(module_of(body))


def test_parse_errors_show_the_place() -> None:
    with pytest.raises(mlir.ParseError, match="'f31' is not an element type"):
        module_of("mo.graph @g(%0: !mo.tensor<[2], f31, cpu:0>) { mo.output() : () -> () }")
    with pytest.raises(mlir.ParseError, match="Operation mo.ad is not registered"):
        module_of("mo.graph @g() { mo.ad() : () -> () }")
    with pytest.raises(mlir.ParseError, match="the graph returns .*, its signature declares f32"):
        module_of("mo.graph @g() -> (!mo.tensor<[2], f32, cpu:0>) { mo.output() : () -> () }")
    with pytest.raises(mlir.ParseError, match="expected an integer, a symbol"):
        module_of("mo.graph @g(%0: !mo.tensor<[n *], f32, cpu:0>) { mo.output() : () -> () }")
    with pytest.raises(mlir.ParseError, match="3 elements do not fill the shape"):
        module_of("mo.graph @g() attributes {x = #mo.dense<f32, [2], [1.0, 2.0, 3.0]>} {}")


def test_locations_are_written_on_demand() -> None:
    module = module_of('mo.graph @g() { mo.output() : () -> () loc("f.py":3:0) }')
    assert "f.py" not in mlir.print_module(module)
    assert 'loc("f.py":3:0)' in mlir.print_module(module, locations=True)


def test_building_an_op_checks_it() -> None:
    x = mlir.TensorType.get(DType.float32, (2, 3))
    with pytest.raises(TypeError, match="mo.reshape: the result types do not follow"):
        mlir.build("mo.reshape", ())
    with pytest.raises(TypeError, match="mo.reshape: the result types do not follow"):
        mlir.infer_types("mo.reshape", [x], {})
    with pytest.raises(KeyError):
        mlir.build("mo.nothing")
    assert mlir.infer_types("mo.transpose", [x], {"perm": (1, 0)}) == (x.with_shape((3, 2)),)


def test_an_op_that_changed_since_it_was_verified_is_verified_again() -> None:
    def changed(change: Callable[[mlir.MoOp, mlir.MoOp], object]) -> mlir.ModuleOp:
        module = module_of(
            "mo.graph @g(%x: !mo.tensor<[2, 3], f32, cpu:0>) -> (!mo.tensor<[3, 2], f32, cpu:0>) {"
            "  %y = mo.relu(%x) : (!mo.tensor<[2, 3], f32, cpu:0>) -> !mo.tensor<[2, 3], f32, cpu:0>"
            f"  %z = mo.transpose(%y) {{perm = {to_attr((1, 0))}}}"
            "    : (!mo.tensor<[2, 3], f32, cpu:0>) -> !mo.tensor<[3, 2], f32, cpu:0>"
            "  mo.output(%z) : (!mo.tensor<[3, 2], f32, cpu:0>) -> () }"
        )
        mlir.verify_module(module)
        relu, transpose, _ = mlir.walk(module)
        change(relu, transpose)
        return module

    other = mlir.TensorType.get(DType.float32, (5, 3))

    def retype(op: mlir.MoOp) -> None:
        op.results[0]._type = other

    changes: dict[str, Callable[[mlir.MoOp, mlir.MoOp], object]] = {
        "a value": lambda _, op: op.attributes.update(perm=to_attr((0, 0))),
        "a name": lambda _, op: op.attributes.update(axis=to_attr(1)),
        "an operand": lambda relu, op: setattr(op, "operands", [op.operands[0]] * 2),
        "the type of an operand": lambda relu, _: retype(relu),
        "the type of a result": lambda _, op: retype(op),
        "an erased operand": lambda relu, op: relu.results[0].erase(safe_erase=False),
    }
    mlir.verify_module(changed(lambda *_: None))
    for what, change in changes.items():
        module = changed(change)
        with pytest.raises((ValueError, VerifyException)):
            list(mlir.walk(module))[1].verify()
            pytest.fail(f"{what} was not seen")


def test_a_call_is_verified_again_as_its_subgraph_may_have_changed() -> None:
    module = module_of(
        "mo.subgraph @f() { mo.output() : () -> () }"
        'mo.graph @g() { mo.call() {callee = @f, prefix = ""} : () -> () mo.output() : () -> () }'
    )
    mlir.verify_module(module)
    mlir.subgraphs(module)["f"].attributes["sym_name"] = StringAttr("h")
    with pytest.raises(mlir.VerifyError, match="call: the module has no subgraph @f"):
        mlir.verify_module(module)
