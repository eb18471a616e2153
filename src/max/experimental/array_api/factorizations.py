"""Factorizations of stacks of matrices: kernels of the kernel language on float64.

Each takes and returns stacks ``[batch, rows, columns]``; a worker factorizes a whole matrix. The inner loops walk along
rows, so QR and the singular values, which combine columns, take transposed matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max import kernel as k
from max.dtype import DType
from max.experimental import functional as F
from max.graph import TensorType, TensorValue, ops

__all__ = ["cholesky", "lu", "orthogonal_rows", "qr_of_rows", "solve_factored"]

_PREFIX = "max.array_api."
_W = 8
_SWEEPS = 60
"""Sweeps of rotations, at most; ten are many."""
_EPSILON = 2.220446049250313e-16
"""The distance from 1 to the next float64."""
_MAX_FLOAT = 1.7976931348623157e308
"""The greatest finite float64."""


@k.inline
def copy_row(target: Any, i: Any, source: Any, j: Any) -> None:
    """Copies row `j` of a matrix to row `i` of another one."""
    for c, mask in k.vectors(target.shape[1], _W):
        target.store(i, c, value=source.load(j, c, width=_W, mask=mask), mask=mask)


@k.inline
def add_row(target: Any, i: Any, source: Any, j: Any, factor: Any, start: Any) -> None:
    """Adds a multiple of row `j` of a matrix to row `i` of another one, from a column on."""
    for c, mask in k.vectors(start, target.shape[1], _W):
        row = target.load(i, c, width=_W, mask=mask)
        target.store(i, c, value=row + factor * source.load(j, c, width=_W, mask=mask), mask=mask)


@k.inline
def dot(x: Any, i: Any, y: Any, j: Any, start: Any, stop: Any) -> Any:
    """The product of row `i` of a matrix and row `j` of another one, between two columns."""
    total = k.splat(k.f64(0), _W)
    for c, mask in k.vectors(start, stop, _W):
        total += x.load(i, c, width=_W, mask=mask) * y.load(j, c, width=_W, mask=mask)
    return k.reduce_add(total)


@k.inline
def rotate(m: Any, p: Any, q: Any, cosine: Any, sine: Any) -> None:
    """Rotates two rows of a matrix."""
    for c, mask in k.vectors(m.shape[1], _W):
        x = m.load(p, c, width=_W, mask=mask)
        y = m.load(q, c, width=_W, mask=mask)
        m.store(p, c, value=cosine * x - sine * y, mask=mask)
        m.store(q, c, value=sine * x + cosine * y, mask=mask)


@k.inline
def tangent_of(ratio: Any) -> Any:
    """The tangent of the lesser angle whose rotation makes an off-diagonal element 0 (Jacobi)."""
    tangent = 1.0 / (k.abs(ratio) + k.sqrt(ratio * ratio + 1.0))
    return k.select(ratio < 0, -tangent, tangent)


@k.inline
def set_identity(m: Any) -> None:
    """Ones on the diagonal, zeros elsewhere."""
    for i in range(m.shape[0]):
        for j in range(m.shape[1]):
            m[i, j] = k.select(i == j, k.f64(1), k.f64(0))


@k.register(_PREFIX + "lu")
def _lu(lu: k.Output, order: k.Output, signs: k.Output, a: k.Input, ctx: k.Context) -> None:
    n = a.shape[1]
    for b in ctx.parallel(a.shape[0]):
        m = lu[b]
        sign = k.f64(1)
        for i in range(n):
            copy_row(m, i, a[b], i)
            order[b, i] = i
        for c in range(n):
            # partial pivoting: the greatest magnitude of the rest of the column
            best = c
            top = k.abs(m[c, c])
            for r in range(c + 1, n):
                size = k.abs(m[r, c])
                if size > top:
                    top = size
                    best = r
            if best != c:
                rotate(m, c, best, 0.0, 1.0)
                # the rotation by a right angle also negates a row
                for j, mask in k.vectors(n, _W):
                    m.store(c, j, value=-m.load(c, j, width=_W, mask=mask), mask=mask)
                other = order[b, c]
                order[b, c] = order[b, best]
                order[b, best] = other
                sign = -sign
            pivot = m[c, c]
            # a singular matrix has factors and a determinant; `solve` refuses it
            if pivot != 0:
                for r in range(c + 1, n):
                    factor = m[r, c] / pivot
                    # the lower factor, without its ones
                    m[r, c] = factor
                    add_row(m, r, m, c, -factor, c + 1)
        signs[b] = sign


@k.register(_PREFIX + "solve")
def _solve(x: k.Output, lu: k.Input, order: k.Input, right: k.Input, ctx: k.Context) -> None:
    n = lu.shape[1]
    for b in ctx.parallel(lu.shape[0]):
        m, rows = lu[b], x[b]
        for r in range(n):
            # the lower factor: rows in the order of the pivots
            copy_row(rows, r, right[b], order[b, r])
            for c in range(r):
                add_row(rows, r, rows, c, -m[r, c], 0)
        for i in range(n):
            # the upper factor: from the last row on
            r = n - 1 - i
            for c in range(r + 1, n):
                add_row(rows, r, rows, c, -m[r, c], 0)
            pivot = m[r, r]
            if pivot == 0:
                raise ValueError("matrix {} of the stack is singular", b)
            for j, mask in k.vectors(rows.shape[1], _W):
                rows.store(r, j, value=rows.load(r, j, width=_W, mask=mask) / pivot, mask=mask)


@k.register(_PREFIX + "cholesky")
def _cholesky(out: k.Output, a: k.Input, ctx: k.Context) -> None:
    n = a.shape[1]
    for b in ctx.parallel(a.shape[0]):
        m = out[b]
        for r in range(n):
            for c in range(r):
                m[r, c] = (a[b, r, c] - dot(m, r, m, c, 0, c)) / m[c, c]
            square = a[b, r, r] - dot(m, r, m, r, 0, r)
            # not `square <= 0`: NaN is an error too
            if square > 0:
                m[r, r] = k.sqrt(square)
            else:
                raise ValueError("matrix {} of the stack is not positive definite", b)
            for c in range(r + 1, n):
                m[r, c] = 0.0


@k.register(_PREFIX + "qr")
def _qr(
    q: k.Output, r: k.Output, diagonal: k.Output, scales: k.Output, a: k.Input, ctx: k.Context
) -> None:
    n, size, steps = a.shape[1], a.shape[2], diagonal.shape[1]
    for b in ctx.parallel(a.shape[0]):
        w, result = r[b], q[b]
        for i in range(n):
            copy_row(w, i, a[b], i)
        # row c keeps the reflection of its column from place c on
        for c in range(steps):
            head = w[c, c]
            tail = dot(w, c, w, c, c + 1, size)
            diagonal[b, c] = head
            scales[b, c] = 0.0
            if tail != 0:
                length = k.sqrt(head * head + tail)
                # of the other sign than head, so that their difference loses no digits
                length = k.select(head < 0, length, -length)
                first = head - length
                w[c, c] = first
                diagonal[b, c] = length
                # the reflection is I - scale * v v^T, with v = (first, the rest)
                scales[b, c] = 2.0 / (first * first + tail)
                for i in range(c + 1, n):
                    add_row(w, i, w, c, -scales[b, c] * dot(w, c, w, i, c, size), c)
        # q: the reflections of the identity, the last one first
        set_identity(result)
        for i in range(steps):
            c = steps - 1 - i
            if scales[b, c] != 0:
                for j in range(result.shape[0]):
                    factor = -scales[b, c] * dot(w, c, result, j, c, size)
                    add_row(result, j, w, c, factor, c)
        for c in range(steps):
            # r takes the place of the reflections
            w[c, c] = diagonal[b, c]
            for j in range(c + 1, size):
                w[c, j] = 0.0


@k.register(_PREFIX + "orthogonal_rows")
def _orthogonal_rows(w: k.Output, v: k.Output, a: k.Input, ctx: k.Context) -> None:
    n, size = a.shape[1], a.shape[2]
    for b in ctx.parallel(a.shape[0]):
        rows, turns = w[b], v[b]
        for i in range(n):
            copy_row(rows, i, a[b], i)
            # also refuses NaN, with which no row would be rotated
            if not dot(rows, i, rows, i, 0, size) <= _MAX_FLOAT:
                raise ValueError("matrix {} of the stack has elements that are not finite", b)
        set_identity(turns)
        rotated = 1
        # rounding errors of a product of rows, and of a row: below them rotations would go on without end
        tolerance = _EPSILON * (4.0 + k.sqrt(k.f64(size)))
        for _ in range(_SWEEPS):
            if rotated != 0:
                rotated = 0
                top = k.f64(0)
                for i in range(n):
                    top = k.max(top, dot(rows, i, rows, i, 0, size))
                # of squared norms: rows of rounding errors are left alone
                least = top * (k.f64(size) * _EPSILON) * (k.f64(size) * _EPSILON)
                for p in range(n - 1):
                    for q in range(p + 1, n):
                        one, two = dot(rows, p, rows, p, 0, size), dot(rows, q, rows, q, 0, size)
                        element = dot(rows, p, rows, q, 0, size)
                        bound = tolerance * k.sqrt(one) * k.sqrt(two)
                        if k.min(one, two) > least and k.abs(element) > bound:
                            rotated = 1
                            tangent = tangent_of((two - one) / (2.0 * element))
                            cosine = 1.0 / k.sqrt(tangent * tangent + 1.0)
                            rotate(rows, p, q, cosine, tangent * cosine)
                            rotate(turns, p, q, cosine, tangent * cosine)


def _run(
    name: str, operands: Sequence[TensorValue], results: Sequence[tuple[DType, Sequence[Any]]]
) -> list[TensorValue]:
    device = operands[0].device
    types = [TensorType(dtype, shape, device) for dtype, shape in results]
    return [value.tensor for value in ops.custom(_PREFIX + name, device, list(operands), types)]


@F.functional
def lu(a: TensorValue) -> list[TensorValue]:
    """Lower and upper factors in one matrix, the rows of `a` in their order (int64), and the sign of that order.

    Args:
        a: float64 ``[batch, n, n]``.
    """
    batch, n, _ = a.shape
    return _run(
        "lu", [a], [(DType.float64, a.shape), (DType.int64, [batch, n]), (DType.float64, [batch])]
    )


@F.functional
def solve_factored(factors: TensorValue, order: TensorValue, right: TensorValue) -> TensorValue:
    """The solutions ``[batch, n, columns]`` for matrices that `lu` factorized; a ValueError of the run if one is
    singular.

    Args:
        factors: float64 ``[batch, n, n]``, the first result of `lu`.
        order: int64 ``[batch, n]``, its second.
        right: float64 ``[batch, n, columns]``.
    """
    return _run("solve", [factors, order, right], [(DType.float64, right.shape)])[0]


@F.functional
def cholesky(a: TensorValue) -> TensorValue:
    """The lower factors ``[batch, n, n]``, of the lower triangles; a ValueError of the run where there is none.

    Args:
        a: float64 ``[batch, n, n]``.
    """
    return _run("cholesky", [a], [(DType.float64, a.shape)])[0]


@F.functional
def qr_of_rows(a: TensorValue, complete: bool) -> list[TensorValue]:
    """Orthonormal rows ``q`` and ``r`` with ``a = r q``, by Householder's reflections with the signs of LAPACK.

    Args:
        a: float64 ``[batch, n, m]``: the columns of the matrices.
        complete: Whether there are ``m`` rows, not ``min(n, m)``.

    Returns:
        q ``[batch, rows, m]`` and r ``[batch, n, m]``, which is zero from place `rows` on.
    """
    batch, n, m = (int(dim) for dim in a.shape)
    steps = min(n, m)
    work = [(DType.float64, [batch, size]) for size in (steps, steps)]
    q = (DType.float64, [batch, m if complete else steps, m])
    return _run("qr", [a], [q, (DType.float64, a.shape), *work])[:2]


@F.functional
def orthogonal_rows(a: TensorValue) -> list[TensorValue]:
    """Orthogonal rows ``w`` and rotations ``v`` with ``w = v a``: one-sided rotations of Jacobi.

    Args:
        a: float64 ``[batch, n, m]``, of magnitudes whose squares are finite. An element that is not finite is a
            ValueError of the run.

    Returns:
        w ``[batch, n, m]`` and v ``[batch, n, n]``.
    """
    batch, n, _ = a.shape
    return _run("orthogonal_rows", [a], [(DType.float64, a.shape), (DType.float64, [batch, n, n])])
