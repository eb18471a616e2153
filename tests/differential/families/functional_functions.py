"""`F.functional` of functions of the user: what they take, what they get, and what they return, eagerly and in graphs.

``e:`` programs are called on eager tensors, ``g:`` programs while a graph is being built. Nothing is computed.
"""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.experimental import functional as F
from max.experimental.tensor import Tensor
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, ops
from tests.differential.program import Family, dims_text, dtype_name, evaluate

CPU_REF = DeviceRef.CPU()
NAMES = {
    "F": F, "T": Tensor, "TensorValue": TensorValue, "ops": ops, "Dim": Dim, "DType": DType, "f32": DType.float32,
    "i32": DType.int32, "CPU": CPU, "cpu": CPU_REF, "TensorType": TensorType, "Graph": Graph,
}  # fmt: skip

#: Parameters of the function, and calls of it.
SIGNATURES = {
    "": ["()"],
    "n": ["(3)", "(n=2)", "()", "(3, 4)"],
    "n, m=2": ["(3)", "(3, m=4)", "(m=1, n=5)", "(3, k=1)"],
    "n, *, dtype=f32": ["(3)", "(3, dtype=i32)", "(3, i32)"],
    "n, *rest": ["(3)", "(3, 4, 'a', None)", "(3, [x, x])"],
    "n, **more": ["(3)", "(3, dtype=i32, name='a')", "(3, x=x)"],
    "x": ["(x)", "(x=x)", "([x, x])", "(None)"],
    "x, n=1": ["(x)", "(x, 2)", "(x, n=3)", "(n=3, x=x)"],
    "x, y": ["(x, x)", "(x, 2.0)", "(y=x, x=x)", "(x)"],
}
#: Results that no parameter is needed for.
CONSTANTS = [
    "ops.constant(3.0, f32, cpu)",
    "ops.constant([1, 2], i32, cpu)",
    "ops.range(0, 5, 1, out_dim=5, dtype=f32, device=cpu)",
    "(ops.constant(3.0, f32, cpu), ops.constant(1, i32, cpu))",
    "[ops.constant(3.0, f32, cpu)]",
    "None",
    "ops.broadcast_to(ops.constant(0.0, f32, cpu), [2, 3])",
    "ops.band_part(ops.broadcast_to(ops.constant(1.0, f32, cpu), [3, 4]), num_lower=None, num_upper=0)",
]
OF_NUMBERS = [
    "ops.broadcast_to(ops.constant(0.0, f32, cpu), [n, n])",
    "ops.band_part(ops.broadcast_to(ops.constant(1.0, f32, cpu), [n, Dim(n) + 2]), num_lower=None, num_upper=0)",
    "ops.constant(n, i32, cpu)",
    "ops.constant(1.0, f32, cpu) * n",
]
OF_TENSORS = [
    "x",
    "x + 1",
    "ops.relu(x)",
    "F.relu(x)",
    "ops.concat([x, x], axis=0)",
    "ops.matmul(x, x.T)",
    "x[0]",
    "[x, x * 2]",
    "(x, x)",
    "TensorValue(x)",
    "TensorValue(x) * 2",
    "x.cast(i32)",
    "x.reshape((3, 2))",
    "ops.split(x, [1, 1], axis=0)",
    "ops.sum(x, axis=0)",
    "ops.where(x > 0, x, 0.0)",
    "ops.reshape(x, [x.shape[0], -1])",
    "F.functional(ops.exp)(x)",
    "ops.nothing(x)",
    "x @ x",
]


def programs(seed: int) -> list[str]:
    draw = Random(seed)
    lines: list[str] = []
    for parameters, calls in SIGNATURES.items():
        first = parameters.split(",")[0]
        bodies = CONSTANTS + (OF_NUMBERS if first == "n" else OF_TENSORS if first == "x" else [])
        for call in calls:
            for body in draw.sample(bodies, min(len(bodies), 5)):
                if first == "x" and "y" in parameters and draw.random() < 0.5:
                    body = draw.choice(["x + y", "ops.mul(x, y)", "ops.max(x, y)", "[x, y]"])
                for context in ("e", "g"):
                    lines.append(f"{context}: F.functional(lambda {parameters}: {body}){call}")
    # functions within functions
    lines += [
        f"{context}: f = F.functional(lambda n: {body}); F.functional(lambda n: [f(n), f(n + 1)])({k})"
        for context in ("e", "g")
        for body in OF_NUMBERS
        for k in (2, 3)
    ]
    return list(dict.fromkeys(lines))


def run(line: str) -> Any:
    context, _, code = line.partition(": ")
    if context == "g":
        with Graph("g", input_types=[TensorType(DType.float32, (2, 3), CPU_REF)]) as graph:
            value = evaluate(code, {**NAMES, "x": graph.inputs[0].tensor})
            return text(value)
    with F.lazy() if hasattr(F, "lazy") else contextlib.nullcontext():
        x = Tensor.from_dlpack(np.ones((2, 3), np.float32))
        return text(evaluate(code, {**NAMES, "x": x}))


def text(value: Any) -> str:
    """The type of a result; graph values within others count as tensors, lists and tuples as the same."""
    if isinstance(value, list | tuple):
        return "[" + "; ".join(map(text, value)) + "]"
    if value is None:
        return "None"
    if hasattr(value, "dtype"):
        return f"{dtype_name(value.dtype)}{dims_text(value.shape)}"
    return type(value).__name__


FAMILY = Family(programs=programs, run=run)
