"""Assignments to elements of eager tensors of every rank, by every kind of index; nothing is computed in MAX."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import numpy as np

from max.dtype import DType
from max.experimental import functional as F
from max.experimental.tensor import Tensor
from tests.differential.program import Family, dims_text, dtype_name, evaluate

SHAPES = {"s": (), "v": (4,), "m": (2, 3), "c": (2, 3, 4)}
INDICES = [
    "0",
    "1",
    "-1",
    "9",
    ":",
    "1:",
    "::2",
    "::-1",
    "0:0",
    "...",
    "None",
    "True",
    "0.5",
    "'a'",
    "[0]",
    "n",
]
#: Values: tensors of the selected shape or of others, numbers, lists, arrays.
VALUES = [
    "{t}[{i}]", "{t}[{i}] + 1", "{t}", "s", "v", "m", "3", "2.5", "None", "'a'", "[1.0]", "np.ones(4, np.float32)",
    "{t}[{i}].cast(DType.int32)",
]  # fmt: skip


def programs(seed: int) -> list[str]:
    draw = Random(seed)
    lines: list[str] = []
    for name, shape in SHAPES.items():
        for _ in range(60):
            count = draw.choice([len(shape), len(shape), max(1, len(shape) - 1), len(shape) + 1])
            items = [
                draw.choice(INDICES[: draw.choice([3, 9, len(INDICES)])]) for _ in range(count)
            ]
            index = ", ".join(items) if items else "()"
            value = draw.choice(VALUES[: draw.choice([2, 4, len(VALUES)])]).format(t=name, i=index)
            lines.append(f"{name}[{index}] = {value}; {name}")
    return list(dict.fromkeys(lines))


def run(line: str) -> Any:
    tensors = {
        name: Tensor.from_dlpack(np.ones(shape, np.float32)) for name, shape in SHAPES.items()
    }
    with F.lazy() if hasattr(F, "lazy") else contextlib.nullcontext():
        value = evaluate(line, {**tensors, "n": np.int64(1), "np": np, "DType": DType})
        describe(value)
        return value


def describe(value: Any) -> str | None:
    if isinstance(value, Tensor):
        return f"tensor {dtype_name(value.dtype)}{dims_text(value.shape)}"
    return None


FAMILY = Family(programs=programs, run=run, describe=describe)
