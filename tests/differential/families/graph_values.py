"""Values: graphs that are compiled and run on fixed inputs, where NumPy's rules leave a choice.

The other system compiles slowly, so there are few programs, each with a list of results.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from max import driver, engine
from max.graph import Graph
from tests.differential.families._graph import NAMES, NAMESPACE, line, types_of
from tests.differential.program import Family, describe_values, evaluate

PROGRAMS = [
    line("si32[4]; si32[4]", "[x / y, x % y, ops.mean(x), x]"),
    line("si32[4]; ui8[4]", "[ops.mean(x), ops.mean(y), ops.sum(y), ops.cumsum(y)]"),
    line("bool[4]; bool[4]", "[x * y]"),
    line("bool[4]; bool[4]", "[ops.max(x, y)]"),
    line("bool[4]; bool[4]", "[ops.max(x)]"),
    line("si32[4]", "[ops.is_nan(x)]"),
    line("si32[4]", "[ops.is_inf(x)]"),
    line("si32[4]; si32[4]", "[x ** 2, ops.pow(y, y)]"),
    line("si8[4]; ui8[4]", "[x / x, y / y]"),
]
#: What `x` and what `y` holds.
INPUTS = {
    "int32": ([1, -2, 0, 7], [2, 3, 0, -2]),
    "int8": ([1, -128, 0, 7], [2, -1, 0, 7]),
    "uint8": ([1, 200, 0, 7], [2, 3, 0, 100]),
    "bool": ([True, False, False, True], [True, True, False, False]),
}


def inputs_of(types: list[Any]) -> list[np.ndarray]:
    return [
        np.array(INPUTS[str(t.dtype.name)][number], t.dtype.to_numpy())
        for number, t in enumerate(types)
    ]


def run(text: str) -> list[np.ndarray]:
    given, _, program = text.partition(": ")
    types = types_of(given)
    with Graph("values", input_types=types) as g:
        named = {n: v.tensor for n, v in zip(NAMES, g.inputs, strict=False)}
        outputs = evaluate(program, {**NAMESPACE, **named})
        g.output(*outputs)
    session = engine.InferenceSession(devices=[driver.CPU()])
    arrays = [driver.Tensor.from_numpy(a) for a in inputs_of(types)]
    return [out.to_numpy() for out in session.load(g).execute(*arrays)]


def programs(seed: int) -> list[str]:
    return PROGRAMS


def describe(value: Any) -> str | None:
    return describe_values(value) if isinstance(value, np.ndarray) else None


FAMILY = Family(programs=programs, run=run, describe=describe)
