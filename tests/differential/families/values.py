"""Values that need no compiler: computed sizes, limits of dtypes, elements of tensors through views and copies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from max import driver, dtype, graph
from max.driver import CPU
from max.dtype import DType
from max.graph import Dim, Shape
from tests.differential.families._plain import plain_family

FLOATS = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
).split()
LIMITS = ("bits", "eps", "max", "min", "tiny", "smallest_normal", "smallest_subnormal", "dtype")
NUMBERS = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64".split()


def limits(name: str) -> list[tuple[str, str]]:
    """What `finfo` says of a float."""
    info = dtype.finfo(getattr(DType, name))
    return [(limit, repr(getattr(info, limit))) for limit in LIMITS if hasattr(info, limit)]


def _size(draw: random.Random, depth: int) -> str:
    """An expression over sizes, of which one operand at least is a `Dim`."""
    if not depth or draw.random() < 0.2:
        return draw.choice(["Dim(7)", "Dim(12)", "Dim(1)", "n", "m", "Dim(0)"])
    op = draw.choice(["+", "-", "*", "//", "+", "*"])
    right = draw.choice([str(draw.randint(1, 9)), _size(draw, depth - 1)])
    return f"({_size(draw, depth - 1)} {op} {right if op != '//' else draw.randint(1, 5)})"


def sized(expression: Callable[[], Any]) -> Any:
    """An expression over sizes, in a graph, which 25.7 needs for it."""
    with graph.Graph("sizes"):
        return expression()


def _array(draw: random.Random) -> tuple[str, tuple[int, ...]]:
    shape = draw.choice([(6,), (2, 3), (3, 4), (2, 3, 4), (1, 8)])
    kind = draw.choice(NUMBERS)
    low = draw.choice([0, 0, 1]) if kind.startswith("u") or kind == "bool" else -5
    count = low + int(np.prod(shape))
    return f"np.arange({low}, {count}).astype('{kind}').reshape({shape})", shape


def _index(draw: random.Random, shape: tuple[int, ...]) -> str:
    """An index for each axis, as both versions need it."""
    slices = ["1:", ":", "::2", ":-1", ":1"]
    return ", ".join(
        draw.choice([str(draw.randint(-size, size - 1)), draw.choice(slices)]) for size in shape
    )


def more(seed: int) -> list[str]:
    """Expressions over sizes, and elements of tensors that were viewed, copied, moved and written."""
    draw = random.Random(seed)
    lines = [f"sized(lambda: {_size(draw, 3)})" for _ in range(120)]
    lines += [f"sized(lambda: Shape([{_size(draw, 1)}, 3, {_size(draw, 2)}]))" for _ in range(25)]
    for _ in range(140):
        array, shape = _array(draw)
        index, element = _index(draw, shape), ", ".join(str(size - 1) for size in shape)
        kind = draw.choice(NUMBERS)
        used = draw.choice([
            "t.to_numpy()", "(t.num_elements, t.element_size, t.rank, t.is_contiguous)", "t.copy()", "t.to(CPU())",
            f"t.view(DType.{kind})", f"t.view(DType.{kind}, ({draw.choice([2, 3, 6, 12])},))",
            f"t[{index}]", f"t[{index}].to_numpy()", f"t[{index}].contiguous()", f"t[{index}].is_contiguous",
            f"t[{element}].item()", f"u = t.copy(); u[{element}] = 1; (t, u)",
            "u = zeros_of(t); u.inplace_copy_from(t); u", "np.from_dlpack(t)", "u = t.to_numpy(); u[...] = 1; t",
        ])  # fmt: skip
        lines.append(f"t = T({array}); {used}")
    return lines


PROGRAMS = "\n".join(f"limits('{name}')" for name in [*FLOATS, "int32", "bool"])


def zeros_of(tensor: Any) -> Any:
    """A tensor of zeros of the same shape and dtype."""
    return type(tensor).zeros(tuple(tensor.shape), tensor.dtype)


def _namespace() -> dict[str, Any]:
    # the class is Tensor in one version and Buffer in the next
    kind = getattr(driver, "Buffer", None) or driver.Tensor
    return {
        "CPU": CPU, "DType": DType, "Dim": Dim, "Shape": Shape, "T": kind.from_numpy, "graph": graph, "limits": limits,
        "m": Dim("m"), "n": Dim("n"), "np": np, "sized": sized, "zeros_of": zeros_of,
    }  # fmt: skip


def _first(value: Any) -> str | None:
    """Sizes by their value."""
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {value.tolist()}"
    return None


FAMILY = plain_family(PROGRAMS, _namespace, more, _first)
