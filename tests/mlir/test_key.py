"""The text that identifies the program of a module, against the printed module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, IndexType, IntegerType, ModuleOp
from xdsl.parser import Parser

from max import mlir
from max.dtype import DType
from max.mlir.attributes import to_attr
from max.mlir.builtin import FloatAttr, from_xdsl, to_xdsl

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "mo").glob("*.mlir"))
BODY = (
    "mo.graph @g(%a: !mo.tensor<[2, n], f32, cpu:0>, %b: !mo.tensor<[2, n], f32, cpu:0>) {{"
    " %x = mo.sub(%a, %b) {{k = {k}}} : (!mo.tensor<[2, n], f32, cpu:0>, !mo.tensor<[2, n], f32, cpu:0>)"
    " -> !mo.tensor<[2, n], f32, cpu:0>"
    " mo.output({out}) : (!mo.tensor<[2, n], f32, cpu:0>) -> () }}"
)


def key(out: str = "%x", k: str = "1", names: str = "ab") -> str:
    text = BODY.format(k=k, out=out)
    for old, new in zip("ab", names, strict=True):
        text = text.replace(f"%{old}", f"%new_{new}")
    return mlir.key_text(mlir.parse_module(text))


def test_what_differs_has_other_keys() -> None:
    attributes = [
        "1", "2", "true", "1.0", "0.0", "-0.0", '"1"', "@one", "unit", "[]", "[1]", "[[1]]", "[1, 2]", "{}", "{a = 1}",
        "{b = 1}", "array<i64: 1>", "array<i64>", '["1", "2"]', '["1\', \'2"]', "#mo.dim<n>", "#mo.shape<[n]>",
        "#mo.shape<[n, 1]>",
        "#mo.dtype<f32>", '"f32"', "#mo.device<cpu:0>", "#mo.device<cpu:1>", "#mo.dense<f32, [1], [1.0]>",
        "#mo.dense<f32, [1], [2.0]>", "#mo.dense<f32, [], [1.0]>", "#mo.dense<si32, [1], [1]>",
    ]  # fmt: skip
    keys = [key(k=k) for k in attributes] + [key(out="%a"), key(out="%b")]
    assert len(set(keys)) == len(keys)


def test_the_order_of_operands_and_arguments_counts() -> None:
    text = BODY.format(k="1", out="%x")
    swapped = text.replace("mo.sub(%a, %b)", "mo.sub(%b, %a)")
    twice = text.replace("mo.sub(%a, %b)", "mo.sub(%a, %a)")
    more = text.replace("@g(", "@g(%c: !mo.tensor<[3], si8, cpu:0>, ")
    other = more.replace("[3], si8", "[3], si16")
    texts = [text, swapped, twice, more, other]
    assert len({mlir.key_text(mlir.parse_module(each)) for each in texts}) == len(texts)


def test_names_and_places_of_values_do_not_matter() -> None:
    assert key() == key(names="cd") != key(names="ba", out="%a")
    module = mlir.parse_module(BODY.format(k="1", out="%x"))
    text = mlir.key_text(module)
    for op in mlir.walk(module):
        op.location = mlir.line_location("elsewhere.py", 3)
    assert mlir.key_text(module) == text


def test_parameters_of_opaque_types_count() -> None:
    def of(parameters: str) -> str:
        kind = f'!mo.opaque<"table"{parameters}>'
        return mlir.key_text(
            mlir.parse_module(f"mo.graph @g(%a: {kind}) {{ mo.output() : () -> () }}")
        )

    parameters = ["", ", {a = 1}", ", {a = 2}", ", {b = 1}", ", {a = 1, b = 1}"]
    assert len({of(text) for text in parameters}) == len(parameters)
    assert of(", {a = 1, b = 2}") == of(", {b = 2, a = 1}")


def test_attributes_of_other_dialects_count() -> None:
    types = [IntegerType(32), IntegerType(64), IndexType()]
    keys = []
    for kind in types + types:
        module = mlir.parse_module(BODY.format(k="1", out="%x"))
        next(op for op in mlir.walk(module) if op.name == "mo.sub").attributes["k"] = kind
        keys.append(mlir.key_text(module))
    assert keys[:3] == keys[3:] and len(set(keys)) == 3


def test_where_a_region_ends_counts() -> None:
    """An op at the end of a region is another program than one behind it."""
    texts = [
        "builtin.module { builtin.module { builtin.module {} } }",
        "builtin.module { builtin.module {} builtin.module {} }",
    ]
    assert len({mlir.key_text(_plain_module(text)) for text in texts}) == 2


def _plain_module(text: str) -> ModuleOp:
    """A module of xDSL's own ops."""
    context = Context()
    context.load_dialect(Builtin)
    return Parser(context, text).parse_module()


def test_large_constants_count_by_name() -> None:
    def of(name: str, value: float) -> str:
        module = mlir.new_module()
        attr = mlir.constant_attr(np.full(100, value, np.float32), name)
        module.body.block.add_op(
            mlir.build(
                "mo.constant", (), {"value": attr}, [mlir.TensorType.get(DType.float32, [100])]
            )
        )
        return mlir.key_text(module)

    assert of("a", 1.0) == of("a", 2.0) != of("b", 1.0)


def test_small_resources_count_by_their_elements() -> None:
    """A file may hold any constant apart; the compiler folds small ones into code."""

    def of(value: float, size: int, name: str = "c") -> str:
        kind = f"!mo.tensor<[{size}], f32, cpu:0>"
        constant = f'mo.constant() {{value = #mo.resource<"{name}">}} : () -> {kind}'
        text = f"mo.graph @g() {{ %c = {constant} mo.output(%c) : ({kind}) -> () }}"
        return mlir.key_text(mlir.parse_module(text, {name: np.full(size, value, np.float32)}))

    for size in (1, mlir.INLINE_LIMIT):
        assert of(1.0, size) == of(1.0, size)
        assert len({of(1.0, size), of(2.0, size), of(1.0, size, "d")}) == 3
    assert of(1.0, mlir.INLINE_LIMIT + 1) == of(2.0, mlir.INLINE_LIMIT + 1)


@pytest.mark.parametrize("path", GOLDEN[:: max(1, len(GOLDEN) // 20)], ids=lambda path: path.stem)
def test_modules_that_print_alike_have_one_key(path: Path) -> None:
    module = mlir.parse_module(path.read_text(), _Any())
    again = mlir.parse_module(mlir.print_module(module), _Any())
    assert mlir.key_text(module) == mlir.key_text(again) == mlir.key_text(module.clone())


class _Any(dict[str, np.ndarray]):
    """An array for each name."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> np.ndarray:
        return np.zeros(1, np.float32)


def test_attributes_of_mlir_and_back() -> None:
    values = [True, 3, -(1 << 70), 0.5, "a", (1, 2), ("a", 1.5), {"x": (1, True)}, None]
    for value in values:
        attr = to_attr(value)
        assert type(to_xdsl(attr)).__module__ == "xdsl.dialects.builtin"
        assert from_xdsl(to_xdsl(attr)) == attr
    assert str(mlir.line_location("f.py", 3)) == 'loc("f.py":3:0)'


def test_attributes_of_other_kinds_differ() -> None:
    nan, one = (
        float("nan"),
        [to_attr(v) for v in (True, 1, 1.0, "1", (1,), ((1,),), {"1": 1}, None)],
    )
    assert all((a == b) == (i == j) for i, a in enumerate(one) for j, b in enumerate(one))
    assert FloatAttr(nan) == FloatAttr(nan) and FloatAttr(0.0) != FloatAttr(-0.0)
    assert hash(FloatAttr(0.5)) == hash(FloatAttr(0.5)) and FloatAttr(0.5) != FloatAttr(0.25)
