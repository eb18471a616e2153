"""Random programs of element-wise, shape and reduction ops, with their NumPy reference.

A program is drawn step by step; each step takes tensors that are there and adds one. `stage` makes its graph,
`evaluate` gives its values in float64, `script` the Python that stages it, to paste into a bug report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

Array = np.ndarray


@dataclass(frozen=True)
class Step:
    """One op: its staging function and its reference function."""

    text: str
    """The op in Python, with ``{0}``, ``{1}`` for its operands."""
    operands: tuple[int, ...]
    build: Callable[..., TensorValue]
    meaning: Callable[..., Array]


UNARY: dict[str, tuple[Callable[..., Any], Callable[..., Array]]] = {
    "ops.tanh({0})": (ops.tanh, np.tanh),
    "ops.sigmoid({0})": (ops.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "ops.relu({0})": (ops.relu, lambda x: np.maximum(x, 0)),
    "ops.sin({0})": (ops.sin, np.sin),
    "-{0}": (ops.negate, np.negative),
    "ops.abs({0})": (ops.abs, np.abs),
    "{0} * 0.5 + 1": (lambda x: x * 0.5 + 1, lambda x: x * 0.5 + 1),
    "ops.sqrt(ops.abs({0}) + 1)": (
        lambda x: ops.sqrt(ops.abs(x) + 1),
        lambda x: np.sqrt(np.abs(x) + 1),
    ),
}
BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Array]]] = {
    "{0} + {1}": (ops.add, np.add),
    "{0} - {1}": (ops.sub, np.subtract),
    "ops.tanh({0}) * ops.tanh({1})": (
        lambda x, y: ops.tanh(x) * ops.tanh(y),
        lambda x, y: np.tanh(x) * np.tanh(y),
    ),
    "ops.max({0}, {1})": (ops.max, np.maximum),
    "ops.min({0}, {1})": (ops.min, np.minimum),
    "{0} / (1 + ops.abs({1}))": (
        lambda x, y: x / (1 + ops.abs(y)),
        lambda x, y: x / (1 + np.abs(y)),
    ),
}


@dataclass(frozen=True)
class Program:
    """Inputs and steps; the outputs are the last value and all unused values."""

    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]

    @property
    def outputs(self) -> list[int]:
        """Returns the indices of the values that the program returns."""
        taken = {i for step in self.steps for i in step.operands}
        count = len(self.shapes) + len(self.steps)
        return [i for i in range(count) if i == count - 1 or i not in taken]

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Returns random float32 inputs."""
        return [rng.uniform(-2, 2, shape).astype(np.float32) for shape in self.shapes]

    def stage(self, symbolic: bool) -> Graph:
        """Stages the graph; with `symbolic`, each size above 1 is a symbol (equal sizes, one symbol)."""
        types = [
            TensorType(
                DType.float32,
                [f"n{size}" if symbolic and size > 1 else size for size in shape],
                DeviceRef.CPU(),
            )
            for shape in self.shapes
        ]
        with Graph("random", input_types=types) as graph:
            values = [value.tensor for value in graph.inputs]
            for step in self.steps:
                values.append(step.build(*(values[i] for i in step.operands)))
            graph.output(*(values[i] for i in self.outputs))
        return graph

    def evaluate(self, inputs: list[Array]) -> list[Array]:
        """Returns the reference outputs in float64."""
        values = [x.astype(np.float64) for x in inputs]
        for step in self.steps:
            values.append(step.meaning(*(values[i] for i in step.operands)))
        return [values[i] for i in self.outputs]

    def script(self) -> str:
        """Returns the program as Python source."""
        names = [f"v{i}" for i in range(len(self.shapes) + len(self.steps))]
        lines = [f"# inputs float32: {dict(zip(names, self.shapes, strict=False))}"]
        for name, step in zip(names[len(self.shapes) :], self.steps, strict=True):
            lines.append(f"{name} = {step.text.format(*(names[i] for i in step.operands))}")
        lines.append(f"graph.output({', '.join(names[i] for i in self.outputs)})")
        return "\n".join(lines)

    __repr__ = script


def _broadcasts(x: tuple[int, ...], y: tuple[int, ...]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(x[::-1], y[::-1], strict=False))


def _reduce(kind: str, axis: int) -> Step:
    build = {"sum": ops.sum, "mean": ops.mean, "max": ops.max, "softmax": ops.softmax}[kind]

    def softmax(x: Array) -> Array:
        e = np.exp(x - x.max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)

    meaning = {
        "sum": lambda x: x.sum(axis, keepdims=True),
        "mean": lambda x: x.mean(axis, keepdims=True),
        "max": lambda x: x.max(axis, keepdims=True),
        "softmax": softmax,
    }[kind]
    text = f"ops.{kind}({{0}}, axis={axis})"
    return Step(text, (), lambda x: build(x, axis=axis), meaning)


def _move(kind: str, rank: int, axis: int) -> Step:
    if kind == "transpose":
        return Step(
            f"ops.transpose({{0}}, {axis}, -1)",
            (),
            lambda x: ops.transpose(x, axis, -1),
            lambda x: np.swapaxes(x, axis, -1),
        )
    if kind == "flatten":
        return Step("ops.flatten({0})", (), ops.flatten, np.ravel)
    if kind == "unsqueeze":
        return Step(
            f"ops.unsqueeze({{0}}, {axis})",
            (),
            lambda x: ops.unsqueeze(x, axis),
            lambda x: np.expand_dims(x, axis),
        )
    index = (slice(None),) * axis
    if kind == "reverse":
        at: tuple[Any, ...] = (*index, slice(None, None, -1))
    elif kind == "every_second":
        at = (*index, slice(None, None, 2))
    else:
        at = (*index, 0)
    return Step(f"{{0}}[{at}]", (), lambda x: x[at], lambda x: x[at])


@st.composite
def programs(draw: st.DrawFn, max_steps: int = 8) -> Program:
    """Draws programs of up to `max_steps` steps on one to three inputs."""
    sizes = st.sampled_from([1, 2, 3, 5, 8])
    shapes = draw(
        st.lists(st.lists(sizes, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)
    )
    known: list[tuple[int, ...]] = list(shapes)
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, max_steps))):
        first = draw(st.integers(0, len(known) - 1))
        shape = known[first]
        kind = draw(st.sampled_from(["unary", "binary", "binary", "reduce", "move", "concat"]))
        operands = (first,)
        if kind in ("binary", "concat"):
            fits = (
                _broadcasts
                if kind == "binary"
                else (lambda x, y: x[1:] == y[1:] and len(x) == len(y))
            )
            partners = [i for i, other in enumerate(known) if shape and fits(shape, other)]
            if not partners:
                kind = "unary"
            else:
                operands = (first, draw(st.sampled_from(partners)))
        if kind == "unary" or not shape:
            text = draw(st.sampled_from(sorted(UNARY)))
            step = Step(text, operands[:1], *UNARY[text])
        elif kind == "binary":
            text = draw(st.sampled_from(sorted(BINARY)))
            step = Step(text, operands, *BINARY[text])
        elif kind == "concat":
            step = Step(
                "ops.concat([{0}, {1}])",
                operands,
                lambda x, y: ops.concat([x, y]),
                lambda x, y: np.concatenate([x, y]),
            )
        else:
            axis = draw(st.integers(0, len(shape) - 1))
            if kind == "reduce":
                made = _reduce(draw(st.sampled_from(["sum", "mean", "max", "softmax"])), axis)
            else:
                moves = ["transpose", "flatten", "unsqueeze", "reverse", "every_second", "first"]
                made = _move(draw(st.sampled_from(moves)), len(shape), axis)
            step = Step(made.text, operands, made.build, made.meaning)
        steps.append(step)
        probe = [np.zeros(known[i]) for i in step.operands]
        known.append(step.meaning(*probe).shape)
    return Program(tuple(shapes), tuple(steps))
