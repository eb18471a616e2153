"""`max.experimental.custom`: declared ops on tensors and in graphs, against NumPy; declarations and calls that do not
fit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from max import kernel as k
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import CustomOp, Tensor, custom
from max.experimental import functional as F
from max.graph import DeviceRef, Graph, TensorType, TensorValue

T, F32 = custom.TemplateType, DType.float32
_CPU = DeviceRef.CPU()


@k.register("declared_halves")
def _halves(out: k.Output[k.f32, 2], x: k.Input[k.f32, 2], ctx: k.Context, *, factor: int = 1):
    for row in ctx.parallel(out.shape[0]):
        for i in range(out.shape[1]):
            out[row, i] = (x[row, 2 * i] + x[row, 2 * i + 1]) * factor


@k.register("declared_ends")
def _ends(
    first: k.Output[k.f32, 1],
    last: k.Output[k.f32, 1],
    x: k.Input[k.f32, 2],
    y: k.Input[k.f32, 1],
    ctx: k.Context,
):
    for row in ctx.parallel(first.shape[0]):
        first[row] = x[row, 0] + y[row]
        last[row] = x[row, x.shape[1] - 1] - y[row]


N, W = custom.Symbols("n", "w")
HALVES = custom.declare(
    "declared_halves",
    inputs={"x": T(F32, [N, W])},
    outputs=[T(F32, [N, W // 2])],
    parameters={"factor": None},
)
ENDS = custom.declare(
    "declared_ends",
    inputs={"x": T(F32, [N, W]), "y": T(F32, [N])},
    outputs=[T(F32, [N]), T(F32, [N])],
)


@pytest.mark.parametrize("seed", range(4))
def test_on_tensors_and_in_graphs(seed: int) -> None:
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    rows, columns, factor = draw.randrange(1, 6), 2 * draw.randrange(1, 5), draw.randrange(1, 4)
    x, y = (rng.standard_normal(s).astype(np.float32) for s in ((rows, columns), (rows,)))
    halved = (x[:, ::2] + x[:, 1::2]) * factor
    op = HALVES[{"factor": factor}]
    assert op == HALVES[{"factor": factor}] and hash(op) == hash(HALVES[{"factor": factor}])
    found = op(Tensor.from_dlpack(x))
    assert isinstance(found, Tensor) and list(found.shape) == [rows, columns // 2]
    np.testing.assert_allclose(found.to_numpy(), halved, rtol=1e-6)
    first, last = ENDS(y=Tensor.from_dlpack(y), x=Tensor.from_dlpack(x) + 0)
    np.testing.assert_allclose(first.to_numpy(), x[:, 0] + y, rtol=1e-6)
    np.testing.assert_allclose(last.to_numpy(), x[:, -1] - y, rtol=1e-6)

    types = [TensorType(F32, ("rows", "columns"), _CPU), TensorType(F32, ("rows",), _CPU)]
    with Graph("declared", input_types=types) as graph:
        values = [value.tensor for value in graph.inputs]
        half, ends = op(values[0]), ENDS(*values)
        assert type(half) is TensorValue and str(half.shape[1]) == str(values[0].shape[1] // 2)
        graph.output(half, *ends)
    got = InferenceSession().load(graph).execute(x, y)
    for result, want in zip(got, (halved, x[:, 0] + y, x[:, -1] - y), strict=True):
        np.testing.assert_allclose(result.to_numpy(), want, rtol=1e-6)
    # within a function, as any op
    np.testing.assert_allclose(
        F.functional(lambda t: op(t + 0))(Tensor(x)).to_numpy(), halved, rtol=1e-6
    )


def test_names_of_sizes() -> None:
    assert N.symbol_name == "n" and custom.Symbol(N) is N and custom.Symbol("n") == N
    assert custom.Param("g").param_name == "g" and custom.Param("g") != custom.Symbol("g")
    assert isinstance(HALVES, CustomOp) and not HALVES.is_complete and ENDS.is_complete


X = T(F32, [N, W])


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "error", "text"),
    [
        ("declared_halves", {}, [X], ValueError, "there is no input"),
        ("declared_halves", {"x": X}, [], ValueError, "there is no output"),
        (
            "no_such_kernel",
            {"x": X},
            [X],
            ValueError,
            "no kernel is registered as 'no_such_kernel'",
        ),
        ("declared_halves", {"x": T(F32, ["n", W])}, [X], TypeError, "axis 0 of x has 'n'"),
        ("declared_halves", {"x": T(F32, [N * 2, W])}, [X], TypeError, "axis 0 of x is"),
        ("declared_halves", {"x": T(F32, [custom.Param("g"), W])}, [X], TypeError, "parameter g"),
        ("declared_halves", {"x": T(F32, [N])}, [X], ValueError, "symbol w, which no input has"),
        ("declared_halves", {"x": X}, [T(custom.DTypeVar("t"), [N])], ValueError, "the dtype t"),
    ],
)
def test_declarations_without_meaning(
    name: str, inputs: dict[str, Any], outputs: list[Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        custom.declare(name, inputs=inputs, outputs=outputs)


def test_calls_that_do_not_fit() -> None:
    x, y = Tensor.ones((2, 4)), Tensor.ones((2,))
    for call, error, text in (
        (lambda: HALVES(x), TypeError, r"parameters \['factor'\] have no value"),
        (lambda: ENDS(x), TypeError, "missing a required argument: 'y'"),
        (lambda: ENDS(x, y, y), TypeError, "too many positional arguments"),
        (lambda: ENDS(x, Tensor.ones((3,))), ValueError, "axis 0 of y is 3, and 2 in another"),
        (lambda: ENDS(y, y), ValueError, "x has the shape .*, expected 2 axes"),
        (lambda: ENDS(x.cast(DType.int32), y), TypeError, "expected .*float32"),
        (lambda: HALVES[3], TypeError, "expected a mapping"),
        (lambda: T("float32", [N]), TypeError, "expected a DType or a DTypeVar"),
    ):
        with pytest.raises(error, match=text):
            call()
    with pytest.raises(ValueError, match="does not exist"):
        custom.declare("declared_halves", inputs={"x": X}, outputs=[X], custom_extensions=["/no"])
