"""What is computed when a model is loaded: results of weights and constants, unless they are much larger than those."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from xdsl.ir import SSAValue

from max._compiler import mok
from max._compiler.mok import OnceOp
from max._compiler.passes import hoist_to_load
from max._compiler.passes.base import ops_of
from max._compiler.passes.hoist_to_load import compute_once, weights_only
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.mlir import GraphOp, MoOp, verify_module

F = "f32, cpu:0"


def after(body: str, result: str) -> GraphOp:
    """A graph with one result `%r`, after the pass.

    Args:
        body: Its ops.
        result: The type of the result.
    """
    text = f"mo.graph @g(%x: !mo.tensor<[n], {F}>) -> ({result}) {{ {body} mo.output(%r) : ({result}) -> () }}"
    module = mok.parse(f"builtin.module {{ {text} }}")
    verify_module(module)
    (graph,) = [op for op in module.walk() if isinstance(op, GraphOp)]
    compute_once(graph.block)
    verify_module(module)
    return graph


def hoisted(body: str, result: str) -> list[str]:
    """The names of the ops of the graph `after` the pass that are computed at load."""
    computed = [op for op in after(body, result).walk() if isinstance(op, OnceOp)]
    return [op.name for part in computed for op in part.block.ops if op.name != "mok.yield"]


def summary(body: str, result: str) -> str:
    """The ops of the graph `after` the pass, each with its operands; parts computed at load in brackets."""

    def line(op: MoOp, names: dict[SSAValue, str]) -> str:
        for value in op.results:
            names[value] = chr(ord("A") + sum(name.isupper() for name in names.values()))
        operands = [names[value] for value in op.operands]
        results = " ".join(names[value] for value in op.results)
        if isinstance(op, OnceOp):
            inner = names | dict(zip(op.block.args, operands, strict=True))
            return f"[{results} of {'; '.join(line(cast(MoOp, o), inner) for o in op.block.ops)}]"
        return " ".join(filter(None, [results, op.name.split(".")[1], *operands]))

    graph = after(body, result)
    names: dict[SSAValue, str] = {graph.block.args[0]: "x"}
    return "; ".join(line(cast(MoOp, op), names) for op in graph.block.ops)


def weight(name: str) -> str:
    return f'%{name} = mo.constant.external() {{name = "{name}"}} : () -> !mo.tensor<[8], {F}>\n'


def spread(name: str, rows: int) -> str:
    """`rows` copies of a weight of 8 elements."""
    return (
        f"%{name}s = mo.broadcast_to(%{name}) : (!mo.tensor<[8], {F}>) -> "
        f"!mo.tensor<[{rows}, 8], {F}>\n"
    )


@pytest.mark.parametrize(
    ("always", "rows", "at_load"),
    [
        (0, 4, True),
        (0, 5, False),  # 160 bytes of 32
        (160, 5, True),
        (159, 5, False),
        (None, 1 << 23, True),
        (None, (1 << 23) + 1, False),
    ],
)
def test_a_result_much_larger_than_its_weights_is_computed_at_each_run(
    always: int | None, rows: int, at_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if always is not None:
        monkeypatch.setattr(hoist_to_load, "SMALL_BYTES", always)
    t = f"!mo.tensor<[{rows}, 8], {F}>"
    body = (
        weight("w") + spread("w", rows) + f"%y = mo.tanh(%ws) : ({t}) -> {t}\n"
        f"%r = mo.neg(%y) : ({t}) -> {t}\n"
    )
    assert hoisted(body, t) == ["mo.broadcast_to", "mo.tanh", "mo.neg"] * at_load


@pytest.mark.parametrize(
    ("parts", "at_load"), [("wv", True), ("ww", False), ("wvw", False), ("wvu", True)]
)
def test_each_weight_of_a_result_counts_once(
    parts: str, at_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part has four times the bytes of its weight, as the result may have."""
    monkeypatch.setattr(hoist_to_load, "SMALL_BYTES", 0)
    t, whole = f"!mo.tensor<[4, 8], {F}>", f"!mo.tensor<[{4 * len(parts)}, 8], {F}>"
    body = "".join(weight(name) + spread(name, 4) for name in sorted({*parts}))
    operands, types = ", ".join(f"%{name}s" for name in parts), ", ".join([t] * len(parts))
    body += f"%r = mo.concat({operands}) {{axis = 0}} : ({types}) -> {whole}\n"
    expected = ["mo.broadcast_to"] * len({*parts}) + ["mo.concat"]
    assert hoisted(body, whole) == expected * at_load


def test_what_depends_on_a_size_of_the_run_is_not_computed_at_load() -> None:
    t = f"!mo.tensor<[4], {F}>"
    bounds = "{{start = #mo.shape<[{0}]>, stop = #mo.shape<[{1}]>, step = #mo.shape<[1]>}}"
    part = f"%s = mo.slice(%w) {bounds} : (!mo.tensor<[8], {F}>) -> {t}\n"
    end = f"%r = mo.tanh(%s) : ({t}) -> {t}\n"
    assert hoisted(weight("w") + part.format(1, 5) + end, t) == ["mo.slice", "mo.tanh"]
    assert not hoisted(weight("w") + part.format("n", "n + 4") + end, t)


T = f"!mo.tensor<[8, 8], {F}>"
FLAT = f"!mo.tensor<[64], {F}>"
XS = f"%xs = mo.broadcast_to(%x) : (!mo.tensor<[n], {F}>) -> !mo.tensor<[8, n], {F}>\n"
COLUMN, PAIR = f"!mo.tensor<[8, 1], {F}>", f"!mo.tensor<[2], {F}>"
KEPT, PLACES = f"!mo.tensor<[8, 2], {F}>", "!mo.tensor<[8, 2], si64, cpu:0>"
V8, XN = f"!mo.tensor<[8], {F}>", f"!mo.tensor<[8, n], {F}>"
CONSTANT = f"%c = mo.constant() {{value = #mo.dense<f32, [], [2.0]>}} : () -> !mo.tensor<[], {F}>\n"


def square(name: str) -> str:
    return f'%{name} = mo.constant.external() {{name = "{name}"}} : () -> {T}\n'


def transpose(result: str, source: str) -> str:
    return f"%{result} = mo.transpose(%{source}) {{perm = array<i64: 1, 0>}} : ({T}) -> {T}\n"


def op(result: str, name: str, *operands: str, type_: str = T) -> str:
    types = ", ".join([type_] * len(operands))
    return f"%{result} = mo.{name}({', '.join('%' + o for o in operands)}) : ({types}) -> {type_}\n"


def product(result: str, weight: str) -> str:
    return f"%{result} = mo.matmul(%{weight}, %xs) : ({T}, {XN}) -> {XN}\n"


def sizes(dims: str) -> str:
    pair = "!mo.tensor<[2], si64, cpu:0>"
    return (
        f"%s = mo.shape_to_tensor() {{shape = #mo.shape<[{dims}]>}} : () -> {pair}\n"
        f"%r = mo.cast(%s) : ({pair}) -> {PAIR}\n"
    )


X8 = f"%y = mo.matmul(%xs, %xt) : ({XN}, !mo.tensor<[n, 8], {F}>) -> {T}\n"
INPUT = (
    XS
    + f"%xt = mo.transpose(%xs) {{perm = array<i64: 1, 0>}} : ({XN}) -> !mo.tensor<[n, 8], {F}>\n"
    + X8
)
W = square("w")
RESHAPED = f"%t = mo.reshape(%s) : ({T}) -> {FLAT}\n%f = mo.reshape(%t) : ({FLAT}) -> {T}\n"

CASES: dict[str, tuple[str, str, str]] = {
    "a strided view for a product": (
        W + transpose("t", "w") + XS + product("r", "t"),
        XN,
        "A constant; [B of D transpose A; yield D]; C broadcast_to x; D matmul B C; output D",
    ),
    "a strided view for an element-wise op": (
        W + transpose("t", "w") + INPUT + op("r", "add", "y", "t"),
        T,
        "A constant; B transpose A; C broadcast_to x; D transpose C; E matmul C D; F add E B; output F",
    ),
    "a strided view for both": (
        W
        + transpose("t", "w")
        + INPUT
        + op("a", "add", "y", "t")
        + op("b", "matmul", "y", "t")
        + op("r", "add", "a", "b"),
        T,
        "A constant; [B of D transpose A; yield D]; C broadcast_to x; D transpose C; "
        "E matmul C D; F add E B; G matmul E B; H add F G; output H",
    ),
    "a strided view that a computed value needs, too": (
        W
        + transpose("t", "w")
        + op("h", "tanh", "t")
        + INPUT
        + op("a", "add", "y", "t")
        + op("r", "add", "a", "h"),
        T,
        "A constant; [B of D transpose A; E tanh D; yield E]; C transpose A; "
        "D broadcast_to x; E transpose D; F matmul D E; G add F C; H add G B; output H",
    ),
    "a transposed view of a transposed view": (
        W + transpose("s", "w") + transpose("t", "s") + XS + product("r", "t"),
        XN,
        "A constant; B transpose A; C transpose B; D broadcast_to x; E matmul C D; output E",
    ),
    "a reshape that copies": (
        W + transpose("s", "w") + RESHAPED + INPUT + op("r", "add", "y", "f"),
        T,
        "A constant; [B of D transpose A; E reshape D; yield E]; C reshape B; "
        "D broadcast_to x; E transpose D; F matmul D E; G add F C; output G",
    ),
    "a view of a computed value": (
        W + op("h", "tanh", "w") + transpose("t", "h") + INPUT + op("r", "add", "y", "t"),
        T,
        "A constant; [B of D tanh A; yield D]; C transpose B; D broadcast_to x; "
        "E transpose D; F matmul D E; G add F C; output G",
    ),
    "a constant is copied into the part": (
        W
        + CONSTANT
        + f"%cs = mo.broadcast_to(%c) : (!mo.tensor<[], {F}>) -> {T}\n"
        + op("b", "mul", "w", "cs")
        + op("h", "add", "b", "w")
        + INPUT
        + op("r", "add", "y", "h"),
        T,
        "A constant; B constant; [C of E constant; F broadcast_to E; G mul A F; H add G A; "
        "yield H]; D broadcast_to x; E transpose D; F matmul D E; G add F C; output G",
    ),
    "a value of an input, too": (
        W + INPUT + op("a", "add", "y", "w") + op("r", "tanh", "a"),
        T,
        "A constant; B broadcast_to x; C transpose B; D matmul B C; E add D A; F tanh E; output F",
    ),
    "a result of symbolic size": (
        weight("w")
        + f"%s = mo.reshape(%w) : ({V8}) -> {COLUMN}\n"
        + f"%e = mo.broadcast_to(%s) : ({COLUMN}) -> {XN}\n"
        + op("r", "tanh", "e", type_=XN),
        XN,
        "A constant; B reshape A; C broadcast_to B; D tanh C; output D",
    ),
    "sizes without weights": (
        sizes("3, 4"),
        PAIR,
        "[A of B shape_to_tensor; C cast B; yield C]; output A",
    ),
    "symbolic sizes": (
        sizes("3, n"),
        PAIR,
        "A shape_to_tensor; B cast A; output B",
    ),
    "weights move before their first user": (
        XS
        + op("z", "tanh", "xs", type_=XN)
        + W
        + transpose("t", "w")
        + f"%r = mo.matmul(%t, %z) : ({T}, {XN}) -> {XN}\n",
        XN,
        "A constant; [B of D transpose A; yield D]; C broadcast_to x; D tanh C; E matmul B D; output E",
    ),
    "one of two results": (
        W
        + f"%p, %q = mo.top_k(%w) {{k = 2, axis = 1}} : ({T}) -> ({KEPT}, {PLACES})\n"
        + f"%r = mo.cast(%q) : ({PLACES}) -> {KEPT}\n",
        KEPT,
        "A constant; [B of D E top_k A; F cast E; yield F]; output B",
    ),
    "custom ops may have effects": (
        W
        + f'%z = mo.custom(%w) {{symbol = "some", parameters = {{}}}} : ({T}) -> {T}\n'
        + op("r", "tanh", "z"),
        T,
        "A constant; B custom A; C tanh B; output C",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_ops_of_a_graph(name: str) -> None:
    body, result, expected = CASES[name]
    assert summary(body, result) == expected


def test_a_slice_with_one_symbolic_bound_is_not_computed_at_load() -> None:
    t = f"!mo.tensor<[4, 8], {F}>"
    bounds = "{start = #mo.shape<[n, 0]>, stop = #mo.shape<[n + 4, 8]>, step = #mo.shape<[1, 1]>}"
    part = f"%s = mo.slice(%w) {bounds} : ({T}) -> {t}\n"
    assert not hoisted(W + part + op("r", "tanh", "s", type_=t), t)


def test_empty_weights_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of an empty weight has more bytes than the weight; the negative of one has as many."""
    monkeypatch.setattr(hoist_to_load, "SMALL_BYTES", 0)
    empty, one, two = (f"!mo.tensor<[{size}], {F}>" for size in (0, 1, 2))
    body = f'%e = mo.constant.external() {{name = "e"}} : () -> {empty}\n'
    total = f"%r = mo.reduce_sum(%e) {{axis = 0}} : ({empty}) -> {one}\n"
    assert not hoisted(body + total, one)
    negative = op("r", "neg", "e", type_=empty)
    assert hoisted(body + negative, empty) == ["mo.neg"]
    body += f'%o = mo.constant.external() {{name = "o"}} : () -> {one}\n'
    four = f"!mo.tensor<[4], {F}>"
    body += f"%s = mo.broadcast_to(%o) : ({one}) -> {four}\n"
    body += f"%r = mo.concat(%s, %e) {{axis = 0}} : ({four}, {empty}) -> {four}\n"
    assert hoisted(body, four) == ["mo.broadcast_to", "mo.concat"]


def test_a_reshaped_transposed_weight_is_copied_at_load(rng: np.random.Generator) -> None:
    w = rng.standard_normal((129, 257)).astype(np.float32)
    x = rng.standard_normal((129 * 257,)).astype(np.float32)
    cpu = DeviceRef.CPU()
    with Graph("g", input_types=[TensorType(DType.float32, x.shape, cpu)]) as graph:
        columns = ops.transpose(ops.tanh(ops.constant(w, DType.float32, cpu)), 0, 1)
        rows = ops.reshape(ops.transpose(ops.constant(w, DType.float32, cpu), 0, 1), x.shape)
        total = graph.inputs[0].tensor + rows
        graph.output(total, ops.reshape(total, columns.shape) * columns)
    model = InferenceSession(devices=[CPU()]).load(graph)
    assert [part for part in model.kernel_summaries if "tanh" in part or "transpose" in part] == []
    first, second = model.execute(x)
    np.testing.assert_allclose(first.to_numpy(), x + w.T.reshape(-1), rtol=1e-6, atol=1e-6)
    wanted = (x + w.T.reshape(-1)).reshape(257, 129) * np.tanh(w).T
    np.testing.assert_allclose(second.to_numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_values_of_weights_only() -> None:
    """Values of weights and constants alone, unless an attribute has a symbolic size."""
    body = W + CONSTANT + f"%q = mo.log(%w) {{size = #mo.dim<n>}} : ({T}) -> {T}\n"
    body += f"%z = mo.tanh(%w) {{size = #mo.dim<8>}} : ({T}) -> {T}\n" + op("h", "exp", "w")
    body += INPUT + op("r", "add", "y", "h")
    body += f"mo.output(%r) : ({T}) -> ()"
    module = mok.parse(
        f"builtin.module {{ mo.graph @g(%x: !mo.tensor<[n], {F}>) -> ({T}) {{ {body} }} }}"
    )
    (graph,) = [op for op in module.walk() if isinstance(op, GraphOp)]
    ops = ops_of(graph.block)
    constants = weights_only(ops)
    assert [op.name for op in ops if any(v in constants for v in op.results)] == [
        "mo.constant.external",
        "mo.constant",
        "mo.tanh",
        "mo.exp",
    ]


def test_callers_own_what_was_computed_at_load() -> None:
    """An output is no memory of the model, whose later executions would give what the caller has written."""
    device = DeviceRef.CPU()
    with Graph("g", input_types=[TensorType(DType.float32, (2,), device)]) as graph:
        weight = graph.add_weight(Weight("w", DType.float32, [100], device))
        graph.output(ops.exp(weight), graph.inputs[0].tensor + 1)
    values = np.linspace(0, 1, 100, dtype=np.float32)
    model = InferenceSession(devices=[CPU()]).load(graph, weights_registry={"w": values})
    for _ in range(2):
        results = model.execute(Tensor.from_numpy(np.zeros(2, np.float32)))
        result = np.from_dlpack(cast(Tensor, results[0]))
        np.testing.assert_allclose(result, np.exp(values), 1e-6)
        result[:] = 0
