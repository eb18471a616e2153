"""Kernel parameters that are records of operands: each field takes an argument, in order."""

# pyright: reportInvalidTypeForm=false
# element types annotate scalars

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from max import kernel as k
from max._backends.program import KernelRunError
from max._config import flags
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.kernel.frontend.specialize import check_call, tensor_roles
from tests.kernel_language.harness import both, compiled

F32_1 = k.TensorSpec(k.f32, (None,))


class Ragged(NamedTuple):
    rows: k.Input[k.f32, 2]
    offsets: k.Input


class Places(NamedTuple):
    shift: k.i64
    ragged: Ragged
    totals: k.InOut[k.f32, 1]


@k.inline
def add_row(places, b, i):
    for j in range(places.ragged.rows.shape[1]):
        places.totals[b] += places.ragged.rows[i, j]


@k.kernel
def sums(out: k.Output[k.f32, 1], places: Places, factor: k.f32, *, sign: int = 1):
    offsets = places.ragged.offsets
    for b in range(out.shape[0]):
        for i in range(k.i64(offsets[b]), k.i64(offsets[b + 1])):
            add_row(places, b, i)
        out[b] = places.totals[b] * factor + k.f32(places.shift) * sign


@k.kernel
def flat_sums(
    out: k.Output[k.f32, 1], shift: k.i64, rows: k.Input[k.f32, 2], offsets: k.Input,
    totals: k.InOut[k.f32, 1], factor: k.f32, *, sign: int = 1,
):  # fmt: skip
    for b in range(out.shape[0]):
        for i in range(k.i64(offsets[b]), k.i64(offsets[b + 1])):
            for j in range(rows.shape[1]):
                totals[b] += rows[i, j]
        out[b] = totals[b] * factor + k.f32(shift) * sign


def arguments() -> list[Any]:
    rows = np.random.default_rng(3).standard_normal((7, 5)).astype(np.float32)
    offsets = np.array([0, 3, 3, 7], np.uint32)
    return [np.zeros(3, np.float32), np.int64(4), rows, offsets, np.ones(3, np.float32), np.float32(2)]  # fmt: skip


@pytest.mark.parametrize("static", [False, True])
def test_fields_are_arguments_in_order(static):
    values = arguments()
    out, *_, totals, _ = both(sums, values, {"sign": -1}, rtol=1e-6, static=static)
    want = [1 + values[2][a:b].sum() for a, b in ((0, 3), (3, 3), (3, 7))]
    np.testing.assert_allclose(totals, want, rtol=1e-5)
    np.testing.assert_allclose(out, np.array(want) * 2 - 4, rtol=1e-5)


def test_a_record_compiles_to_the_code_of_its_fields():
    specs = [
        F32_1,
        k.i64,
        k.TensorSpec(k.f32, (None, 5)),
        k.TensorSpec(k.u32, (None,)),
        F32_1,
        k.f32,
    ]
    record, flat = (k.specialize(fn, specs) for fn in (sums, flat_sums))
    assert record.text == flat.text
    assert [(s.arg, s.kind, s.axis, s.dtype) for s in record.slots] == [
        (s.arg, s.kind, s.axis, s.dtype) for s in flat.slots
    ]


def test_errors_at_the_run_name_the_field():
    values = arguments()
    values[3][-1] = 8
    with flags.override(MAX_KERNEL_CHECK=1):
        with pytest.raises(KernelRunError, match=r"places\.ragged\.rows.*index 7"):
            compiled(sums, values)
    with pytest.raises(IndexError, match=r"places\.ragged\.rows: index 7"):
        k.interpret(sums, arguments()[:3] + values[3:])


def test_roles_and_checks_of_ops_see_the_fields():
    assert tensor_roles(sums) == ["output", "input", "input", "inout"]
    matrix, vector = k.TensorSpec(k.f32, (None, None)), k.TensorSpec(k.f32, (None,))
    ragged = k.from_source("def twice(out: k.Output, r: R): pass", "twice", {"k": k, "R": Ragged})
    check_call(ragged, [vector], [(matrix, False), (vector, False)], {})
    with pytest.raises(k.KernelTypeError, match=r"r\.rows has rank 2, got 1"):
        check_call(ragged, [vector], [(vector, False), (vector, False)], {})
    with pytest.raises(k.KernelTypeError, match=r"got 2 arguments, and none for 'r\.offsets'"):
        check_call(ragged, [vector], [(matrix, False)], {})
    with pytest.raises(
        k.KernelTypeError, match=r"takes 3 arguments \(out, r\.rows, r\.offsets\), got 4"
    ):
        check_call(ragged, [vector], [(matrix, False), (vector, False), (vector, False)], {})


class Written(NamedTuple):
    x: k.Input
    target: k.InOut


def test_an_op_cannot_write_to_an_operand_of_a_record():
    fn = k.from_source("def f(out: k.Output, w: W): pass", "f", {"k": k, "W": Written})
    with pytest.raises(k.KernelTypeError, match=r"w\.target is k\.InOut, but operand 1"):
        check_call(fn, [F32_1], [(F32_1, False), (F32_1, False)], {})
    check_call(fn, [F32_1], [(F32_1, False), (F32_1, True)], {})


class Factors(NamedTuple):
    a: k.Input[k.f32, 1]
    b: k.Input[k.f32, 1]


@k.register("test_operand_records.products")
def products(out: k.Output[k.f32, 1], factors: Factors, ctx: k.Context):
    for i in ctx.parallel(out.shape[0]):
        out[i] = factors.a[i] * factors.b[i]


@pytest.mark.parametrize("interpret", [False, True])
def test_custom_ops_take_records(interpret):
    cpu = DeviceRef.CPU()
    kind = TensorType(DType.float32, ["n"], cpu)
    with Graph("products", input_types=[kind, kind]) as graph:
        graph.output(
            ops.custom("test_operand_records.products", cpu, list(graph.inputs), [kind])[0]
        )
    x, y = (np.arange(1, 8, dtype=np.float32) + n for n in (0, 3))
    with flags.override(MAX_KERNEL_INTERPRET=interpret):
        (got,) = InferenceSession().load(graph).execute(x, y)
    np.testing.assert_array_equal(got.to_numpy(), x * y)


def test_a_record_that_is_defined_in_a_function():
    class Local(NamedTuple):
        x: k.Input[element, 1]  # type: ignore[name-defined]  # noqa: F821

    # names that the record's module lacks have the value that they have for the kernel
    text = "def copy(out: k.Output[k.f32, 1], r: R):\n    for i in range(out.shape[0]):\n        out[i] = r.x[i]\n"
    fn = k.from_source(text, "copy", {"k": k, "R": Local, "element": k.f32})
    x = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(both(fn, [np.zeros(5, np.float32), x])[0], x)
    with pytest.raises(k.KernelTypeError, match=r"annotations of Local have no value: NameError"):
        k.specialize(k.from_source(text, "copy", {"k": k, "R": Local}), [F32_1, F32_1])


class Untyped(NamedTuple):
    x: k.Input
    y: Any


class Undefined(NamedTuple):
    x: k.Missing  # type: ignore[name-defined]


class WithContext(NamedTuple):
    x: k.Input
    ctx: k.Context


class Endless(NamedTuple):
    x: k.Input
    more: Endless


MISTAKES = [
    ("r: R", Untyped, r"r\.y: typing\.Any is not an annotation of a kernel's parameter; k\.Input"),
    ("r: R", Undefined, r"r: the annotations of Undefined have no value: AttributeError"),
    ("r: R", WithContext, r"r\.ctx: a record holds operands; k\.Context is a parameter of its own"),
    ("r: R", Endless, r"r\.more: the record Endless contains itself"),
    ("r: R", tuple, r"r: <class 'tuple'> is not an annotation"),
    ("*r: R", Ragged, r"\*r takes views or scalars, not"),
]


@pytest.mark.parametrize(
    ("parameter", "record", "message"), MISTAKES, ids=[m for _, _, m in MISTAKES]
)
def test_records_that_do_not_fit(parameter, record, message):
    text = f"def bad(out: k.Output, {parameter}):\n    pass\n"
    fn = k.from_source(text, "bad", {"k": k, "R": record})
    with pytest.raises(k.KernelTypeError, match=message) as caught:
        k.specialize(fn, [F32_1, F32_1, F32_1])
    (diagnostic,) = caught.value.diagnostics
    column = text.index(parameter.lstrip("*")) + 1
    assert (diagnostic.location.line, diagnostic.location.column) == (1, column)
    array = np.zeros(3, np.float32)
    with pytest.raises(k.KernelTypeError, match=message):
        k.interpret(fn, [array, array, array])


def test_arguments_of_another_kind():
    fn = k.from_source("def f(out: k.Output, r: R): pass", "f", {"k": k, "R": Places})
    with pytest.raises(k.KernelTypeError, match=r"r\.shift is a scalar i64, got"):
        k.specialize(fn, [F32_1, F32_1, F32_1, F32_1, F32_1])
    with pytest.raises(k.KernelTypeError, match=r"none for 'r\.ragged\.rows'"):
        k.interpret(fn, [np.zeros(3, np.float32), np.int64(1)])
