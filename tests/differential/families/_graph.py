"""Shared by the graph families: a notation for inputs, the names that programs use, and draws.

A line is ``inputs: program``. The inputs are ``none`` or types such as ``f32[a, 4]`` and ``buffer f32[3]``,
separated by ``; ``; the program calls them ``x``, ``y``, ``z``, ``w`` and its graph ``g``.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from max import graph
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Dim, Graph, Shape, TensorType, Weight, ops
from tests.differential.program import Family, evaluate

SHORT = {
    "bool": "bool", "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16",
    **{f"si{n}": f"int{n}" for n in (8, 16, 32, 64)}, **{f"ui{n}": f"uint{n}" for n in (8, 16, 32, 64)},
}  # fmt: skip
FLOATS, INTS = ["f32", "f64", "bf16", "f16"], ["si32", "si64", "si8", "ui8", "ui32", "si16"]
ALL = [*FLOATS, *INTS, "bool"]
NAMES = "xyzw"


class _Kernels:
    """`max.nn.kernels`, imported when a program uses it: one of the versions needs more packages for that."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("max.nn.kernels"), name)


NAMESPACE: dict[str, Any] = {
    **{short: getattr(DType, long) for short, long in SHORT.items()},
    "graph": graph,
    "kernels": _Kernels(),
    "ops": ops,
    "np": np,
    "DType": DType,
    "BufferType": BufferType,
    "DeviceRef": DeviceRef,
    "CPU": DeviceRef.CPU(),
    "GPU": DeviceRef.GPU(),
    "Dim": Dim,
    "Graph": Graph,
    "Shape": Shape,
    "TensorType": TensorType,
    "TensorValue": graph.TensorValue,
    "Weight": Weight,
}


def types_of(given: str) -> list[TensorType | BufferType]:
    """``f32[a, 4]; buffer si64[]`` as types; a device other than ``cpu:0`` follows the dims."""
    if given == "none":
        return []
    found: list[TensorType | BufferType] = []
    for text in given.split("; "):
        match = re.fullmatch(r"(buffer )?(\w+)\[(.*)\]( gpu:0)?", text)
        assert match, text
        dims = [int(d) if d.isdigit() else d for d in match[3].split(", ") if d]
        device = DeviceRef.GPU() if match[4] else DeviceRef.CPU()
        cls = BufferType if match[1] else TensorType
        found.append(cls(getattr(DType, SHORT[match[2]]), dims, device))
    return found


def run(line: str) -> Any:
    """Stages the program in a graph of its inputs; values that it gives become the graph's outputs."""
    given, _, program = line.partition(": ")
    with Graph("program", input_types=types_of(given)) as g:
        inputs = dict(zip(NAMES, g.inputs, strict=False))
        value = evaluate(program, {**NAMESPACE, **inputs, "g": g, "inputs": g.inputs})
        if "g.output" not in program:
            flat = value if isinstance(value, list | tuple) else [value]
            g.output(*(v for v in flat if isinstance(v, graph.TensorValue)))
    return value


def family(programs: Any) -> Family:
    return Family(programs=programs, run=run)


def line(given: Sequence[str] | str, program: str) -> str:
    inputs = given if isinstance(given, str) else "; ".join(given)
    return f"{inputs or 'none'}: {program}"


class Draw(random.Random):
    """Draws of the graph API's arguments."""

    def shape(
        self, rank: int | None = None, dims: Sequence[Any] = (1, 2, 3, 4, 5, "a", "b")
    ) -> list[Any]:
        return [
            self.choice(list(dims)) for _ in range(self.randint(0, 4) if rank is None else rank)
        ]

    def some(self, items: Iterable[Any], count: int) -> list[Any]:
        """*count* of the items, or all of them if there are fewer."""
        pool = list(items)
        return self.sample(pool, min(count, len(pool)))


def tensor(dtype: str, shape: Sequence[Any]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
