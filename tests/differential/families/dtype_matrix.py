"""Each op that compares, sorts, sums or selects, with each dtype: bools and all integers among them."""

from __future__ import annotations

from tests.differential.families._graph import ALL, Draw, family, line, tensor

DTYPES = [*ALL, "ui16", "ui64"]
OPS = (
    "ops.argmax(x)", "ops.argmin(x, axis=0)", "ops.argsort(x)", "ops.argsort(x, ascending=False)", "ops.top_k(x, 1)",
    "ops.top_k(x, 2, axis=0)", "ops.max(x)", "ops.min(x, axis=0)", "ops.max(x, x)", "ops.sum(x)", "ops.mean(x)",
    "ops.cumsum(x)", "ops.cumsum(x, reverse=True)", "ops.softmax(x)", "ops.nonzero(x, 'n')", "ops.where(x > 0, x, x)",
    "ops.where(x, y, y)", "ops.gather(y, x, 0)", "ops.gather_nd(y, x)", "ops.scatter(y, y, x, 0)",
    "ops.masked_scatter(y, x, y, 'n')", "ops.band_part(x, -1, 0)", "ops.repeat_interleave(x, 2)", "ops.tile(x, [2, 1])",
    "ops.logical_not(x)", "ops.logical_and(x, x)", "x & x", "~x", "ops.floor(x)", "ops.is_nan(x)", "ops.abs(x)", "-x",
    "x == x", "x < x", "ops.pow(x, 2)", "ops.elementwise.max(x, x)", "ops.elementwise.min(x, x)", "x @ x",
)  # fmt: skip
VECTORS = (
    "ops.argsort(x)", "ops.argsort(x, ascending=False)", "ops.argmax(x)", "ops.top_k(x, 2)",
    "ops.random.set_seed(1); ops.random.uniform(x.type, (0, 9))", "ops.random.set_seed(1); ops.random.gaussian(x.type)",
    "ops.random.set_seed(1); ops.random.normal(x.type, 3, 2)", "ops.range(0, 4, 1, dtype=x.dtype, device=CPU)",
)  # fmt: skip


def programs(seed: int) -> list[str]:
    draw = Draw(seed)
    lines = [
        line([tensor(dtype, draw.choice([[3, 3], ["a", "a"]])), tensor("f32", [3, 3])], op)
        for op in OPS
        for dtype in DTYPES
    ]
    lines += [
        line(tensor(dtype, draw.choice([[4], ["a"]])), op) for op in VECTORS for dtype in DTYPES
    ]
    return list(dict.fromkeys(lines))


FAMILY = family(programs)
