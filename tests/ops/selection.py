"""Cases of ops that sort, and of ops whose number of results is known only at run time."""

from __future__ import annotations

import numpy as np

from max.graph import ops
from tests.ops.case import ALL, NUMBERS, Array, OpCase


def _argsort(x: Array, ascending: bool = True) -> Array:
    # sorts pairs (value, index) of each column, an independent definition of the order
    sign = 1 if ascending else -1
    flat = x.reshape(len(x), -1)
    order = [sorted(range(len(x)), key=lambda i: (sign * float(column[i]), i)) for column in flat.T]
    return np.array(order, np.int64).reshape(-1, len(x)).T.reshape(x.shape)


def _masked_scatter(x: Array, mask: Array, updates: Array) -> Array:
    out = x.copy()
    where = np.broadcast_to(mask, x.shape)
    out[where] = updates.ravel()[: where.sum()]
    return out


SELECTION: tuple[OpCase, ...] = (
    OpCase("argsort", ops.argsort, _argsort, (("a",),), NUMBERS),
    OpCase(
        "argsort_long",
        ops.argsort,
        _argsort,
        (("a",),),
        ("int16", "float32"),
        sizes=(1023, 1025, 5000),
    ),
    OpCase(
        "argsort_descending",
        lambda x: ops.argsort(x, ascending=False),
        lambda x: _argsort(x, ascending=False),
        (("a", "b", 3),),
        ("float32", "bfloat16", "int8", "uint64"),
    ),
    OpCase(
        "nonzero",
        lambda x: ops.nonzero(x, "count"),
        np.argwhere,
        (("a", "b", 3),),
        ALL,
        domain=(-1.0, 1.0),
    ),
    OpCase(
        "nonzero_long",
        lambda x: ops.nonzero(x, "count") * 2,
        lambda x: 2 * np.argwhere(x),
        (("a", "b"),),
        ("bool",),
        sizes=(200, 777),
    ),
    OpCase(
        "masked_scatter",
        lambda x, m, u: ops.masked_scatter(x, m, u, "count"),
        _masked_scatter,
        (("a", "b"), ("b",), ("a", "b")),
        ("float32", "bfloat16", "int64", "bool"),
        fixed={1: ("bool", (0, 1))},
    ),
)
