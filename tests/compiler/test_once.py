"""What is computed when a model is loaded: results of weights and constants, unless they are much larger than those."""

from __future__ import annotations

import pytest

from max._compiler import mok
from max._compiler.mok import OnceOp
from max._compiler.passes import once
from max._compiler.passes.once import compute_once
from max.mlir import GraphOp, verify_module

F = "f32, cpu:0"


def hoisted(body: str, result: str) -> list[str]:
    """The names of the ops that are computed at load, of a graph with one result `%r`.

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
    computed = [op for op in module.walk() if isinstance(op, OnceOp)]
    return [op.name for part in computed for op in part.block.ops if op.name != "mok.yield"]


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
        monkeypatch.setattr(once, "SMALL_BYTES", always)
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
    monkeypatch.setattr(once, "SMALL_BYTES", 0)
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
