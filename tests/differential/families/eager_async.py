"""Tensors as asyncio takes them: awaited, run, gathered, as tasks, in threads. Their elements are there already."""

from __future__ import annotations

import asyncio
import inspect
from random import Random
from typing import Any

import numpy as np

from max.experimental.tensor import Tensor
from tests.differential.program import Family, dims_text, dtype_name, evaluate

#: Ways to wait for an awaitable within a coroutine.
WAYS = [
    "await {a}",
    "await asyncio.wait_for({a}, 30)",
    "await asyncio.shield({a})",
    "await asyncio.ensure_future({a})",
    "await asyncio.create_task({a})",
    "await asyncio.gather({a}, {b})",
    "await asyncio.gather({a}, asyncio.sleep(0), {b})",
    "[await f for f in asyncio.as_completed([{a}])]",
    "(await asyncio.gather({a}, return_exceptions=True))[0]",
    "await asyncio.create_task({a}, name='a')",
]
AWAITABLES = ["x.realize", "y.realize", "x", "i.realize"]
OTHERS = [
    "asyncio.run(x.realize)",
    "asyncio.run(y.realize)",
    "asyncio.run(x)",
    "asyncio.iscoroutine(x.realize)",
    "asyncio.iscoroutine(x)",
    "inspect.isawaitable(x.realize)",
    "inspect.isawaitable(x)",
    "hasattr(x, '__await__')",
    "asyncio.run(asyncio.wait_for(x.realize, 3))",
    "asyncio.run(asyncio.sleep(0, x))",
]


def programs(seed: int) -> list[str]:
    draw = Random(seed)
    lines = [
        f"run({way.format(a=a, b=draw.choice(AWAITABLES))!r})" for way in WAYS for a in AWAITABLES
    ]
    return list(dict.fromkeys(lines + OTHERS))


def run(line: str) -> Any:
    x, y, i = (
        Tensor.from_dlpack(np.ones(shape, dtype))
        for shape, dtype in (((2, 3), np.float32), ((), np.float32), ((4,), np.int32))
    )
    names = {"asyncio": asyncio, "inspect": inspect, "x": x, "y": y, "i": i}

    def in_loop(code: str) -> Any:
        scope: dict[str, Any] = dict(names)
        exec(f"async def main():\n    return {code}", scope)
        return asyncio.run(scope["main"]())

    return evaluate(line, {**names, "run": in_loop})


def describe(value: Any) -> str | None:
    if isinstance(value, Tensor):
        return f"tensor {dtype_name(value.dtype)}{dims_text(value.shape)}"
    return None


FAMILY = Family(programs=programs, run=run, describe=describe)
