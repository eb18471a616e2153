"""Random calls of the functions of the array API standard: `draw` has the arguments of one, by the function's rules.

Arrays are drawn with sizes of 0 and 1, broadcasting, all dtypes that the function takes, and the standard's special
values: zeros of both signs, infinities, NaNs. `compare` makes the call with tensors and with arrays of another library
of the standard.

``python -m tests.experimental.standard_calls --count N`` compares N calls of each function with `array_api_strict`,
where
that is installed, else with NumPy.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from max.dtype import DType
from max.experimental import Tensor
from max.experimental import array_api as xp

Array = np.ndarray[Any, Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
Rng = np.random.Generator

FLOATS = ("float32", "float64")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = SIGNED + UNSIGNED
NUMBERS = INTEGERS + FLOATS
ALL = ("bool", *NUMBERS)
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1e-8, -1e30)


def shape_of(rng: Rng, low: int = 0, high: int = 3) -> tuple[int, ...]:
    """A shape; one size in ten is 0."""
    rank = int(rng.integers(low, high + 1))
    return tuple(int(rng.choice([0, 1, 2, 3, 5], p=[0.1, 0.2, 0.3, 0.2, 0.2])) for _ in range(rank))


def filled(rng: Rng, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without sizes of 0."""
    return tuple(max(size, 1) for size in shape)


def pick(rng: Rng, among: tuple[Any, ...]) -> Any:
    return among[int(rng.integers(len(among)))]


def chance(rng: Rng, probability: float = 0.5) -> bool:
    return bool(rng.random() < probability)


def elements(rng: Rng, shape: tuple[int, ...], dtype: str, special: bool = False) -> Array:
    """An array: small numbers, so that sums and products are exact or close; at times special values."""
    if dtype == "bool":
        return np.asarray(rng.random(shape) < 0.5)
    if dtype in UNSIGNED:
        return np.asarray(rng.integers(0, 9, shape), dtype)
    if dtype in SIGNED:
        return np.asarray(rng.integers(-9, 9, shape), dtype)
    array = np.asarray(rng.standard_normal(shape) * 3, dtype)
    if special:
        array = np.where(rng.random(shape) < 0.5, rng.choice(SPECIAL, shape), array)
    return np.asarray(array, dtype)


def narrowed(rng: Rng, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts with another one."""
    sizes = [1 if chance(rng, 0.3) else size for size in shape]
    return tuple(sizes[int(rng.integers(len(shape) + 1)) :]) if chance(rng, 0.3) else tuple(sizes)


def partner(rng: Rng, dtype: str) -> str:
    """A dtype that promotes with another one."""
    for kind in (FLOATS, SIGNED, UNSIGNED):
        if dtype in kind:
            kind = kind + SIGNED if kind is UNSIGNED and dtype != "uint64" else kind
            return pick(rng, kind)
    return "bool"


def axis_of(rng: Rng, rank: int) -> int:
    return int(rng.integers(-rank, rank))


def axes_of(rng: Rng, rank: int) -> int | tuple[int, ...] | None:
    """None, one axis or several."""
    kind = int(rng.integers(3))
    if kind == 0 or not rank:
        return None
    if kind == 1:
        return axis_of(rng, rank)
    axes = rng.permutation(rank)[: int(rng.integers(1, rank + 1))]
    return tuple(int(axis) - (rank if chance(rng) else 0) for axis in axes)


def unary(dtypes: tuple[str, ...]) -> Callable[[Rng], Call]:
    return lambda rng: ((elements(rng, shape_of(rng), pick(rng, dtypes), special=True),), {})


def binary(dtypes: tuple[str, ...], mixed: bool = True) -> Callable[[Rng], Call]:
    def draw(rng: Rng) -> Call:
        dtype, shape = pick(rng, dtypes), shape_of(rng)
        other = partner(rng, dtype) if mixed else dtype
        other = other if other in dtypes else dtype
        operands = [
            elements(rng, shape, dtype, True),
            elements(rng, narrowed(rng, shape), other, True),
        ]
        if chance(rng, 0.2):
            number = elements(rng, (), dtype, True).item()
            operands[1] = abs(number) if dtype in UNSIGNED else number
        return tuple(operands if chance(rng) else operands[::-1]), {}

    return draw


def shifts(rng: Rng) -> Call:
    (x, y), _ = binary(INTEGERS)(rng)
    return (x, np.asarray(np.abs(y) % 7) if isinstance(y, np.ndarray) else abs(y) % 7), {}


def nonzero_divisor(rng: Rng) -> Call:
    (x, y), _ = binary(NUMBERS)(rng)
    if isinstance(y, int):
        return (x, y or 1), {}
    whole = isinstance(y, np.ndarray) and y.dtype.kind in "iu"
    return (x, np.where(y == 0, np.ones_like(y), y) if whole else y), {}


def powers(rng: Rng) -> Call:
    (x, y), _ = binary(NUMBERS)(rng)
    whole = isinstance(y, int) or (isinstance(y, np.ndarray) and y.dtype.kind in "iu")
    return (
        x,
        np.asarray(abs(y) % 4)
        if isinstance(y, np.ndarray) and whole
        else abs(y) % 4
        if whole
        else y,
    ), {}


def clipped(rng: Rng) -> Call:
    dtype, shape = pick(rng, NUMBERS), shape_of(rng)
    x = elements(rng, shape, dtype, True)
    low: Any = elements(rng, narrowed(rng, shape), dtype) if chance(rng) else 1
    high: Any = (
        np.asarray(low + 3, dtype)
        if isinstance(low, np.ndarray)
        else low + 3
        if dtype not in ("int8", "uint8") or isinstance(low, int)
        else low
    )
    low = None if chance(rng, 0.2) else low
    return (x, low, None if chance(rng, 0.2) else high), {}


def selected(rng: Rng) -> Call:
    (x, y), _ = binary(ALL)(rng)
    shape = np.broadcast_shapes(np.shape(x), np.shape(y))
    return (elements(rng, narrowed(rng, shape), "bool"), x, y), {}


def reduced(
    dtypes: tuple[str, ...], empty: bool = True, special: bool = False, dtype: bool = False
) -> Callable[[Rng], Call]:
    def draw(rng: Rng) -> Call:
        shape = shape_of(rng) if empty else filled(rng, shape_of(rng))
        kwargs: dict[str, Any] = {"axis": axes_of(rng, len(shape)), "keepdims": chance(rng)}
        kwargs = {k: v for k, v in kwargs.items() if chance(rng, 0.8)}
        kind = pick(rng, dtypes)
        if dtype and chance(rng, 0.2):
            kwargs["dtype"] = np.dtype("float64" if kind in FLOATS else "int64")
        return (elements(rng, shape, kind, special),), kwargs

    return draw


def spread(rng: Rng) -> Call:
    (x,), kwargs = reduced(FLOATS, empty=False)(rng)
    return (x,), kwargs | ({"correction": pick(rng, (0, 0.5))} if chance(rng) else {})


def cumulative(rng: Rng) -> Call:
    shape = shape_of(rng, 1)
    kwargs: dict[str, Any] = {"include_initial": chance(rng)} if chance(rng) else {}
    if len(shape) > 1 or chance(rng):
        kwargs["axis"] = axis_of(rng, len(shape))
    return (elements(rng, shape, pick(rng, NUMBERS)),), kwargs


def differences(rng: Rng) -> Call:
    shape = filled(rng, shape_of(rng, 1))
    axis, dtype = axis_of(rng, len(shape)), pick(rng, NUMBERS)
    kwargs: dict[str, Any] = {"axis": axis, "n": int(rng.integers(3))}
    for name in ("prepend", "append"):
        if chance(rng, 0.4):
            sizes = list(shape)
            sizes[axis] = int(rng.integers(1, 3))
            kwargs[name] = elements(rng, tuple(sizes), dtype)
    return (elements(rng, shape, dtype),), kwargs


def one_index(rng: Rng) -> Call:
    shape = filled(rng, shape_of(rng))
    axis = None if chance(rng, 0.3) or not shape else axis_of(rng, len(shape))
    return (elements(rng, shape, pick(rng, NUMBERS)),), {"axis": axis, "keepdims": chance(rng)}


def ordered(rng: Rng) -> Call:
    shape = shape_of(rng, 1)
    kwargs: dict[str, Any] = {
        "axis": axis_of(rng, len(shape)),
        "descending": chance(rng),
        "stable": True,
    }
    kwargs = {k: v for k, v in kwargs.items() if chance(rng, 0.7)}
    return (elements(rng, shape, pick(rng, NUMBERS)),), kwargs


def placed(rng: Rng) -> Call:
    dtype = pick(rng, NUMBERS)
    x1 = elements(rng, (int(rng.integers(1, 7)),), dtype)
    x2, kwargs = elements(rng, shape_of(rng), dtype), {"side": pick(rng, ("left", "right"))}
    if chance(rng):
        return (x1, x2), kwargs | {"sorter": np.argsort(x1, stable=True)}
    return (np.sort(x1), x2), kwargs


def taken(rng: Rng) -> Call:
    shape = filled(rng, shape_of(rng, 1))
    axis = axis_of(rng, len(shape))
    indices = rng.integers(-shape[axis], shape[axis], int(rng.integers(0, 5)))
    kwargs = {"axis": axis} if len(shape) > 1 or chance(rng) else {}
    return (elements(rng, shape, pick(rng, ALL)), indices), kwargs


def taken_along(rng: Rng) -> Call:
    shape = filled(rng, shape_of(rng, 1))
    axis = axis_of(rng, len(shape))
    sizes = list(shape)
    sizes[axis] = int(rng.integers(1, 5))
    indices = rng.integers(-shape[axis], shape[axis], sizes)
    return (elements(rng, shape, pick(rng, ALL)), indices), {"axis": axis}


def product(rng: Rng) -> Call:
    dtype, rank = pick(rng, NUMBERS), int(rng.integers(2))
    m, k, n = (int(rng.integers(0, 6)) for _ in range(3))
    batch = shape_of(rng, 0, 2)
    left, right = (*batch, m, k), (*narrowed(rng, batch), k, n)
    if not rank and chance(rng, 0.3):
        left, right = ((k,), right) if chance(rng) else (left, (k,))
    return (elements(rng, left, dtype), elements(rng, right, partner(rng, dtype))), {}


def contracted(rng: Rng) -> Call:
    x, y = shape_of(rng), list(shape_of(rng))
    pairs = int(rng.integers(0, min(len(x), len(y)) + 1))
    dtype = pick(rng, NUMBERS)
    if chance(rng):
        y[:pairs] = x[len(x) - pairs :]
        axes: Any = pairs
    else:
        axes = tuple(tuple(int(a) for a in rng.permutation(len(s))[:pairs]) for s in (x, y))
        for a, b in zip(*axes, strict=True):
            y[b] = x[a]
    return (elements(rng, x, dtype), elements(rng, tuple(y), dtype)), {"axes": axes}


def dotted(rng: Rng) -> Call:
    shape = filled(rng, shape_of(rng, 1))
    dtype, axis = pick(rng, NUMBERS), int(rng.integers(-len(shape), 0))
    return (elements(rng, shape, dtype), elements(rng, shape, dtype)), {"axis": axis}


def stack_of_matrices(rng: Rng) -> Call:
    return (elements(rng, shape_of(rng, 2, 4), pick(rng, ALL)),), {}


def triangle(rng: Rng) -> Call:
    (x,), _ = stack_of_matrices(rng)
    return (x,), {"k": int(rng.integers(-3, 4))}


def with_axes(rng: Rng) -> Call:
    shape = shape_of(rng)
    return (elements(rng, shape, pick(rng, ALL)),), {"axis": axes_of(rng, len(shape))}


def of_two_axes(rng: Rng) -> Call:
    shape = shape_of(rng, 1)
    x, count = elements(rng, shape, pick(rng, ALL)), int(rng.integers(1, len(shape) + 1))
    if chance(rng):
        return (x, axis_of(rng, len(shape)), axis_of(rng, len(shape))), {}
    return (x, *(tuple(int(a) for a in rng.permutation(len(shape))[:count]) for _ in range(2))), {}


def permuted(rng: Rng) -> Call:
    shape = shape_of(rng)
    axes = tuple(int(a) for a in rng.permutation(len(shape)))
    return (elements(rng, shape, pick(rng, ALL)), axes), {}


def reshaped(rng: Rng) -> Call:
    shape = shape_of(rng)
    sizes = [int(n) for n in rng.permutation(shape)] if shape else []
    sizes.insert(int(rng.integers(len(sizes) + 1)), 1)
    if chance(rng, 0.3) and 0 not in sizes:
        sizes[int(rng.integers(len(sizes)))] = -1
    return (elements(rng, shape, pick(rng, ALL)), tuple(sizes)), {}


def expanded(rng: Rng) -> Call:
    shape = shape_of(rng)
    return (elements(rng, shape, pick(rng, ALL)),), {"axis": axis_of(rng, len(shape) + 1)}


def squeezed(rng: Rng) -> Call:
    shape = shape_of(rng)
    places = rng.permutation(len(shape) + 1)[: int(rng.integers(1, 3))]
    for place in sorted(int(p) for p in places):
        shape = (*shape[:place], 1, *shape[place:])
    ones = tuple(a for a, size in enumerate(shape) if size == 1)
    axis: Any = pick(rng, ones) if chance(rng) else ones[: int(rng.integers(1, len(ones) + 1))]
    return (elements(rng, shape, pick(rng, ALL)), axis), {}


def joined(rng: Rng) -> Call:
    shape, dtype = shape_of(rng, 1), pick(rng, ALL)
    axis = None if chance(rng, 0.2) else axis_of(rng, len(shape))
    arrays = []
    for _ in range(int(rng.integers(1, 4))):
        sizes = list(shape)
        if axis is not None:
            sizes[axis] = int(rng.integers(0, 4))
        arrays.append(elements(rng, tuple(sizes), partner(rng, dtype)))
    return (arrays,), {"axis": axis}


def stacked(rng: Rng) -> Call:
    shape, dtype = shape_of(rng), pick(rng, ALL)
    arrays = [elements(rng, shape, partner(rng, dtype)) for _ in range(int(rng.integers(1, 4)))]
    return (arrays,), {"axis": axis_of(rng, len(shape) + 1)}


def unstacked(rng: Rng) -> Call:
    shape = shape_of(rng, 1)
    return (elements(rng, shape, pick(rng, ALL)),), {"axis": axis_of(rng, len(shape))}


def rolled(rng: Rng) -> Call:
    shape = shape_of(rng)
    axis: Any = axes_of(rng, len(shape))
    shift: Any = int(rng.integers(-7, 8))
    if isinstance(axis, tuple) and chance(rng):
        shift = tuple(int(s) for s in rng.integers(-7, 8, len(axis)))
    return (elements(rng, shape, pick(rng, ALL)), shift), {"axis": axis}


def repeated(rng: Rng) -> Call:
    shape = shape_of(rng)
    x = elements(rng, shape, pick(rng, ALL))
    axis = axis_of(rng, len(shape)) if shape and chance(rng, 0.7) else None
    size = x.size if axis is None else shape[axis]
    many: Any = int(rng.integers(0, 4)) if chance(rng) else rng.integers(0, 3, size)
    return (x, many), {"axis": axis}


def tiled(rng: Rng) -> Call:
    many = tuple(int(n) for n in rng.integers(0, 3, int(rng.integers(0, 4))))
    return (elements(rng, shape_of(rng), pick(rng, ALL)), many), {}


def broadcast(rng: Rng) -> Call:
    shape = shape_of(rng)
    return (elements(rng, narrowed(rng, shape), pick(rng, ALL)), shape), {}


def several(rng: Rng) -> Call:
    shape = shape_of(rng)
    count = int(rng.integers(1, 4))
    return tuple(elements(rng, narrowed(rng, shape), pick(rng, ALL)) for _ in range(count)), {}


def shapes(rng: Rng) -> Call:
    shape = shape_of(rng)
    return tuple(narrowed(rng, shape) for _ in range(int(rng.integers(1, 4)))), {}


def grid(rng: Rng) -> Call:
    dtype = pick(rng, NUMBERS)
    lengths = rng.integers(0, 4, int(rng.integers(1, 4)))
    arrays = [elements(rng, (int(n),), dtype) for n in lengths]
    return tuple(arrays), {"indexing": pick(rng, ("xy", "ij"))} if chance(rng) else {}


def any_array(rng: Rng) -> Call:
    return (elements(rng, shape_of(rng), pick(rng, ALL)),), {}


def membership(rng: Rng) -> Call:
    dtype = pick(rng, INTEGERS)
    operands = (
        elements(rng, shape_of(rng), dtype),
        elements(rng, shape_of(rng), partner(rng, dtype)),
    )
    return operands, {"invert": chance(rng)} if chance(rng) else {}


def nonzero_of(rng: Rng) -> Call:
    return (elements(rng, shape_of(rng, 1), pick(rng, ALL)),), {}


def of_shape(rng: Rng) -> Call:
    kwargs = {"dtype": np.dtype(pick(rng, ALL))} if chance(rng, 0.8) else {}
    return (int(rng.integers(0, 5)) if chance(rng, 0.3) else shape_of(rng),), kwargs


def full_of(rng: Rng) -> Call:
    (shape,), _ = of_shape(rng)
    dtype = pick(rng, ALL)
    value = elements(rng, (), dtype, True).item()
    return (shape, value), {"dtype": np.dtype(dtype)} if chance(rng) else {}


def like(rng: Rng) -> Call:
    return any_array(rng)[0], {"dtype": np.dtype(pick(rng, ALL))} if chance(rng) else {}


def full_like(rng: Rng) -> Call:
    (x,), _ = any_array(rng)
    return (x, elements(rng, (), str(x.dtype), True).item()), {}


def diagonal_ones(rng: Rng) -> Call:
    sizes = [int(n) for n in rng.integers(0, 5, int(rng.integers(1, 3)))]
    kwargs: dict[str, Any] = {"k": int(rng.integers(-3, 4))} if chance(rng) else {}
    return tuple(sizes), kwargs | ({"dtype": np.dtype(pick(rng, ALL))} if chance(rng) else {})


def steps(rng: Rng) -> Call:
    numbers: list[Any] = [int(n) for n in rng.integers(-5, 9, int(rng.integers(1, 3)))]
    if chance(rng, 0.3):
        numbers = [n / 2 for n in numbers]
    if len(numbers) == 2 and chance(rng):
        numbers.append(pick(rng, (1, 2, -1, 0.5)))
    return tuple(numbers), {"dtype": np.dtype(pick(rng, FLOATS))} if chance(rng) else {}


def distances(rng: Rng) -> Call:
    start, stop = (float(n) for n in rng.integers(-5, 9, 2))
    return (start, stop, int(rng.integers(0, 7))), {"endpoint": chance(rng)} if chance(rng) else {}


def converted(rng: Rng) -> Call:
    dtype = pick(rng, ALL)
    to = pick(rng, ALL)
    x = elements(rng, shape_of(rng), dtype)
    # a conversion of what the target can't hold is not defined
    x = np.asarray(np.abs(x)) if to in UNSIGNED and dtype != "bool" else x
    return (x, np.dtype(to)), {}


def types(rng: Rng) -> Call:
    dtype = pick(rng, ALL)
    return tuple(np.dtype(partner(rng, dtype)) for _ in range(int(rng.integers(1, 4)))), {}


def two_types(rng: Rng) -> Call:
    return (np.dtype(pick(rng, ALL)), np.dtype(pick(rng, ALL))), {}


DRAWS: dict[str, Callable[[Rng], Call]] = {
    **dict.fromkeys(
        "abs ceil conj floor imag real round sign square trunc positive isfinite isinf isnan".split(), unary(NUMBERS)
    ),
    **dict.fromkeys(
        "acos acosh asin asinh atan atanh cos cosh exp expm1 log log1p log2 log10 reciprocal signbit sin sinh sqrt "
        "tan tanh".split(),
        unary(FLOATS),
    ),
    "negative": unary(SIGNED + FLOATS),
    "logical_not": unary(("bool",)),
    "bitwise_invert": unary(("bool", *INTEGERS)),
    **dict.fromkeys(
        "add subtract multiply less less_equal greater greater_equal maximum minimum".split(), binary(NUMBERS)
    ),
    **dict.fromkeys("equal not_equal".split(), binary(ALL)),
    **dict.fromkeys("atan2 copysign divide hypot logaddexp nextafter".split(), binary(FLOATS)),
    **dict.fromkeys("bitwise_and bitwise_or bitwise_xor".split(), binary(("bool", *INTEGERS))),
    **dict.fromkeys("logical_and logical_or logical_xor".split(), binary(("bool",))),
    **dict.fromkeys("bitwise_left_shift bitwise_right_shift".split(), shifts),
    **dict.fromkeys("floor_divide remainder".split(), nonzero_divisor),
    "pow": powers,
    "clip": clipped,
    "where": selected,
    **dict.fromkeys("sum prod".split(), reduced(NUMBERS, dtype=True)),
    **dict.fromkeys("max min".split(), reduced(NUMBERS, empty=False, special=True)),
    **dict.fromkeys("all any count_nonzero".split(), reduced(ALL, special=True)),
    "mean": reduced(FLOATS, empty=False),
    **dict.fromkeys("var std".split(), spread),
    **dict.fromkeys("cumulative_sum cumulative_prod".split(), cumulative),
    "diff": differences,
    **dict.fromkeys("argmax argmin".split(), one_index),
    **dict.fromkeys("sort argsort".split(), ordered),
    "searchsorted": placed,
    "take": taken,
    "take_along_axis": taken_along,
    "matmul": product,
    "tensordot": contracted,
    "vecdot": dotted,
    "matrix_transpose": stack_of_matrices,
    **dict.fromkeys("tril triu".split(), triangle),
    "flip": with_axes,
    "moveaxis": of_two_axes,
    "permute_dims": permuted,
    "reshape": reshaped,
    "expand_dims": expanded,
    "squeeze": squeezed,
    "concat": joined,
    "stack": stacked,
    "unstack": unstacked,
    "roll": rolled,
    "repeat": repeated,
    "tile": tiled,
    "broadcast_to": broadcast,
    "broadcast_arrays": several,
    "broadcast_shapes": shapes,
    "meshgrid": grid,
    **dict.fromkeys("unique_all unique_counts unique_inverse unique_values asarray from_dlpack".split(), any_array),
    "isin": membership,
    "nonzero": nonzero_of,
    **dict.fromkeys("zeros ones empty".split(), of_shape),
    **dict.fromkeys("zeros_like ones_like empty_like".split(), like),
    "full": full_of,
    "full_like": full_like,
    "eye": diagonal_ones,
    "arange": steps,
    "linspace": distances,
    "astype": converted,
    "result_type": types,
    "can_cast": two_types,
}  # fmt: skip
"""The function's name, and what draws the arguments of a call."""

KEYWORDS = """
all any argmax argmin count_nonzero max mean min: axis keepdims
empty ones zeros: shape dtype device
empty_like ones_like zeros_like: dtype device
argsort sort: axis descending stable
concat stack flip roll repeat take take_along_axis unstack vecdot: axis
cumulative_prod cumulative_sum: axis dtype include_initial
expand_dims squeeze: axis
prod sum: axis dtype keepdims
std var: axis correction keepdims
tril triu: k
arange: stop step dtype device
asarray: dtype device copy
astype: copy device
broadcast_to: shape
clip: min max
diff: axis n prepend append
eye: k dtype device
from_dlpack: device copy
full: shape fill_value dtype device
full_like: fill_value dtype device
isdtype: dtype kind
isin: invert
linspace: num dtype device endpoint
meshgrid: indexing
permute_dims: axes
reshape: shape copy
searchsorted: side sorter
tensordot: axes
"""
"""The parameters that functions of the standard (2024.12) take by name."""

_DEFAULT_FLOAT = ("zeros", "ones", "empty", "full", "eye", "arange", "linspace")
_REFUSED = (ValueError, TypeError, IndexError, OverflowError)


def arguments(name: str, seed: int) -> Call:
    """The arguments of one call of a function."""
    return DRAWS[name](np.random.default_rng([seed, zlib.crc32(name.encode())]))


def converted_to(value: Any, array: Callable[[Array], Any], dtype: Callable[[Any], Any]) -> Any:
    """Arguments with their arrays and dtypes replaced."""
    if isinstance(value, np.ndarray):
        return array(value.copy())
    if isinstance(value, np.dtype):
        return dtype(value)
    if isinstance(value, list):
        return [converted_to(item, array, dtype) for item in value]
    return value


def ours(name: str, call: Call) -> Any:
    """The result with tensors."""

    def convert(value: Any) -> Any:
        return converted_to(value, Tensor.from_dlpack, DType.from_numpy)

    return getattr(xp, name)(*map(convert, call[0]), **{k: convert(v) for k, v in call[1].items()})


def theirs(name: str, call: Call, library: Any) -> Any:
    """The result with arrays of another library."""
    args, kwargs = call
    if library is np:
        if _is_of_numpy_alone(name, args):
            raise TypeError("the standard leaves this to libraries")
        descending = kwargs.get("descending", False)
        kwargs = {k: v for k, v in kwargs.items() if k != "descending"}
        if descending:
            return _descending(name, args[0], kwargs.get("axis", -1))
        result = getattr(np, name)(*args, **kwargs)
        # NumPy's order is that of a hash table
        return np.sort(result) if name == "unique_values" else result

    def convert(value: Any) -> Any:
        return converted_to(value, library.asarray, lambda dtype: getattr(library, dtype.name))

    return getattr(library, name)(*map(convert, args), **{k: convert(v) for k, v in kwargs.items()})


def _is_of_numpy_alone(name: str, args: tuple[Any, ...]) -> bool:
    """Whether dtypes meet that the standard does not promote, and that NumPy joins in its own way."""
    if name == "can_cast":
        return len({dtype.kind == "b" for dtype in args}) == 2
    names = {array.dtype.name for array in args[0]} if name in ("concat", "stack") else set()
    return "uint64" in names and not names.isdisjoint(SIGNED)


def _descending(name: str, x: Array, axis: int) -> Array:
    """`sort` and `argsort` from the greatest element to the least; equal ones keep their order."""
    if name == "sort":
        return np.flip(np.sort(x, axis=axis), axis=axis)
    order = np.argsort(np.flip(x, axis=axis), axis=axis, stable=True)
    return np.flip(x.shape[axis] - 1 - order, axis=axis)


def plain(result: Any) -> Any:
    """A result as arrays and dtypes of NumPy, in tuples."""
    if isinstance(result, Tensor):
        return result.to_numpy()
    if isinstance(result, DType):
        return result.to_numpy()
    if isinstance(result, tuple | list) and not all(isinstance(item, int) for item in result):
        return tuple([plain(item) for item in result])
    if hasattr(result, "_np_dtype"):
        return result._np_dtype
    return (
        np.asarray(result)
        if hasattr(result, "__array_namespace__") or isinstance(result, np.generic)
        else result
    )


def check(name: str, got: Any, want: Any) -> None:
    """Compares two plain results: shapes, dtypes, elements, signs of zeros."""
    if isinstance(want, tuple) and not isinstance(got, np.ndarray):
        assert len(got) == len(want), f"{len(got)} results, expected {len(want)}"
        for one, other in zip(got, want, strict=True):
            check(name, one, other)
        return
    if not isinstance(got, np.ndarray):
        assert got == want, f"{got}, expected {want}"
        return
    want = np.asarray(want)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    default = name in _DEFAULT_FLOAT and want.dtype == np.float64 and got.dtype == np.float32
    assert got.dtype == want.dtype or default, f"dtype {got.dtype}, expected {want.dtype}"
    if name.startswith("empty"):
        return
    if want.dtype.kind != "f":
        np.testing.assert_array_equal(got, want)
        return
    tolerance = 2e-6 if got.dtype == np.float32 else 1e-13
    np.testing.assert_allclose(got, want, rtol=4 * tolerance, atol=tolerance)
    zero = want == 0
    assert (np.signbit(got[zero]) == np.signbit(want[zero])).all(), f"the sign of a zero of {got}"


def compare(name: str, seed: int, library: Any = np) -> bool:
    """Makes one call both ways.

    Returns:
        Whether the other library takes the call.

    Raises:
        AssertionError: The results differ.
    """
    call = arguments(name, seed)
    try:
        with np.errstate(all="ignore"):
            want = plain(theirs(name, call, library))
    except _REFUSED:
        return False
    try:
        check(name, plain(ours(name, call)), want)
    except Exception as error:
        raise AssertionError(f"{name}, seed {seed}: {error}\narguments: {call}") from error
    return True


def main() -> None:
    """Compares calls; see the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("names", nargs="*", default=list(DRAWS))
    given = parser.parse_args()
    strict = importlib.util.find_spec("array_api_strict") is not None
    library = importlib.import_module("array_api_strict") if strict else np
    counts, failed = Counter[str](), set[str]()
    for name in given.names:
        for seed in range(given.count):
            try:
                counts[
                    "compared" if compare(name, seed, library) else "refused by the library"
                ] += 1
            except AssertionError as failure:
                failed.add(name)
                counts["differ"] += 1
                print(failure, flush=True)
    print(
        f"{library.__name__} {library.__version__}: {len(given.names)} functions, {dict(counts)}, {sorted(failed)}"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
