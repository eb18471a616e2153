"""Ops that passes make: bodies that do not fit their op are errors, and texts read back to the same module."""

from __future__ import annotations

import pytest
from xdsl.utils.exceptions import VerifyException

from max._compiler import mok

X = "!mo.tensor<[4], f32, cpu:0>"
Y = "!mo.tensor<[4], f64, cpu:0>"


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
        (f"^body(%a: {X}):", "expects at least a terminator"),
        (f"^body(%a: {X}):\nmok.yield(%a, %a) : ({X}, {X}) -> ()", "yielded values differ"),
    ],
)
def test_a_body_that_does_not_fit(op: str, body: str, message: str) -> None:
    with pytest.raises(VerifyException, match=message):
        text_of(body, op=op)


def test_a_region_states_its_kind() -> None:
    with pytest.raises(VerifyException, match="kind"):
        text_of(f"^body(%a: {X}):\nmok.yield(%a) : ({X}) -> ()", kind="")


@pytest.mark.parametrize("op", ["mok.region", "mok.once"])
def test_a_body_without_operands(op: str) -> None:
    constant = (
        f"%b = mo.constant() {{value = #mo.dense<f32, [4], [1.0, 2.0, 3.0, 4.0]>}} : () -> {X}"
    )
    text = module(f"^body:\n{constant}\nmok.yield(%b) : ({X}) -> ()", op=op)
    parsed = mok.parse(text.replace("(%x)", "()").replace(f": ({X}) -> {X} {{", f": () -> {X} {{"))
    parsed.verify()


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
