"""The `linalg` extension of the array API standard.

Decompositions are computed in float64, by kernels of the kernel language, and have the dtype of their operand. They run
in stacks: one matrix is factorized by one worker.
"""

from __future__ import annotations

import builtins
import math
from typing import Any, NamedTuple

import numpy as np

from max.dtype import DType, finfo
from max.experimental import functional as F
from max.experimental.array_api import factorizations
from max.experimental.array_api.arguments import Axis, axes_of, shape_of
from max.experimental.array_api.creation import eye, tril, zeros_like
from max.experimental.array_api.data_types import astype, result_type
from max.experimental.array_api.elementwise import sign
from max.experimental.array_api.linear_algebra import (
    matmul,
    matrix_transpose,
    tensordot,
    vecdot,
)
from max.experimental.array_api.manipulation import moveaxis, pair_of
from max.experimental.array_api.reductions import count_nonzero, max, min, prod, sum
from max.experimental.array_api.searching import argsort, take_along_axis
from max.experimental.tensor import Tensor

__all__ = [
    "cholesky", "cross", "det", "diagonal", "eigh", "eigvalsh", "inv", "matmul", "matrix_norm", "matrix_power",
    "matrix_rank", "matrix_transpose", "outer", "pinv", "qr", "slogdet", "solve", "svd", "svdvals", "tensordot",
    "trace", "vecdot", "vector_norm",
]  # fmt: skip


class EighResult(NamedTuple):
    """Eigenvalues in ascending order, and the eigenvectors as columns."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class QRResult(NamedTuple):
    """Orthonormal columns, and an upper triangle."""

    Q: Tensor
    R: Tensor


class SlogdetResult(NamedTuple):
    """The sign of a determinant, and the logarithm of its magnitude."""

    sign: Tensor
    logabsdet: Tensor


class SVDResult(NamedTuple):
    """Left singular vectors as columns, singular values in descending order, right singular vectors as rows."""

    U: Tensor
    S: Tensor
    Vh: Tensor


def _matrices(name: str, x: Tensor, square: builtins.bool = False) -> Tensor:
    """A stack of matrices as float64 ``[batch, rows, columns]``."""
    shape = shape_of(x)
    if len(shape) < 2 or (square and shape[-1] != shape[-2]):
        kind = "square matrices" if square else "matrices"
        raise ValueError(
            f"{name}: the operand is {list(shape)}, expected {kind} [..., rows, columns]"
        )
    if not x.dtype.is_float():
        raise TypeError(f"{name}: the operand is {x.dtype.name}, expected floats")
    return x.cast(DType.float64).reshape((math.prod(shape[:-2]), *shape[-2:]))


def _like(x: Tensor, result: Tensor) -> Tensor:
    """A stack ``[batch, ...]`` in the dtype and with the leading axes of an operand."""
    return result.cast(x.dtype).reshape([*shape_of(x)[:-2], *shape_of(result)[1:]])


def _scale_matrices(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices by their greatest magnitudes ``[batch, 1, 1]``, so that squares are in range."""
    batch, rows, columns = shape_of(stack)
    if not rows * columns:
        return stack, Tensor.ones((batch, 1, 1), dtype=DType.float64)
    top = F.max(F.abs(stack).reshape((batch, 1, rows * columns)), axis=-1)
    top = F.where(F.equal(top, 0.0), 1.0, top)
    return stack / top, top


def cholesky(x: Tensor, /, *, upper: builtins.bool = False) -> Tensor:
    """The triangle ``L`` with ``L @ L.mT`` equal to `x`, whose lower triangle is read; with `upper` its transpose.

    Raises:
        ValueError: A matrix is not positive definite, when it is computed.
    """
    lower = _like(x, factorizations.cholesky(_matrices("cholesky", x, square=True)))
    return lower.mT if upper else lower


def cross(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    """The vector products along an axis of size 3; the other axes broadcast."""
    sizes = {shape_of(x)[axis] for x in (x1, x2)}
    if sizes != {3}:
        raise ValueError(f"cross: axis {axis} has sizes {sorted(sizes)}, expected 3")
    x, y = (moveaxis(x, axis, -1) for x in pair_of("cross", x1, x2))

    def roll_axes(v: Tensor) -> Tensor:
        return F.concat([v[..., 1:], v[..., :1]], axis=-1)

    # element i of the difference is element i - 1 of the product
    return moveaxis(roll_axes(x * roll_axes(y) - roll_axes(x) * y), -1, axis)


def det(x: Tensor, /) -> Tensor:
    """The determinants."""
    factors, _, signs = factorizations.lu(_matrices("det", x, square=True))
    # the lower factor has ones on its diagonal
    return _like(x, prod(diagonal(factors), axis=-1) * signs)


def diagonal(x: Tensor, /, *, offset: int = 0) -> Tensor:
    """The diagonals of matrices, as the last axis."""
    rows, columns = shape_of(x)[-2:]
    places = np.arange(
        builtins.max(
            0, builtins.min(rows + builtins.min(offset, 0), columns - builtins.max(offset, 0))
        )
    )
    return x[..., places - builtins.min(offset, 0), places + builtins.max(offset, 0)]


def eigh(x: Tensor, /) -> EighResult:
    """Eigenvalues and eigenvectors of symmetric matrices, whose lower triangles are read.

    Raises:
        ValueError: At the run: a lower triangle has elements that are not finite.
    """
    lower, top = _scale_matrices(tril(_matrices("eigh", x, square=True)))
    symmetric = lower + tril(lower, k=-1).mT
    n = shape_of(lower)[-1]
    # shifted by a bound of the eigenvalues it is positive, and its singular vectors are the eigenvectors
    bound = max(sum(F.abs(symmetric), axis=-1), axis=-1).reshape((-1, 1, 1)) if n else top
    _, vectors = factorizations.orthogonal_rows(symmetric + bound * eye(n, dtype=DType.float64))
    # Rayleigh quotients of the matrix without the shift, which would cost digits
    values = sum((vectors @ symmetric) * vectors, axis=-1)
    order = argsort(values, axis=-1)
    values = take_along_axis(values, order) * top.squeeze(-1)
    return EighResult(_like(x, values), _like(x, _rows(vectors, order).mT))


def _rows(stack: Tensor, order: Tensor) -> Tensor:
    """The rows of matrices in an order ``[batch, rows]``."""
    return F.gather_nd(stack, order.unsqueeze(-1), batch_dims=1)


def eigvalsh(x: Tensor, /) -> Tensor:
    """The eigenvalues of symmetric matrices in ascending order; see `eigh`."""
    return eigh(x).eigenvalues


def inv(x: Tensor, /) -> Tensor:
    """The inverses.

    Raises:
        ValueError: A matrix is singular, when it is computed.
    """
    stack = _matrices("inv", x, square=True)
    batch, n, _ = shape_of(stack)
    factors, order, _ = factorizations.lu(stack)
    ones = F.broadcast_to(eye(n, dtype=DType.float64), (batch, n, n))
    return _like(x, factorizations.solve_factored(factors, order, ones))


def matrix_norm(
    x: Tensor, /, *, keepdims: builtins.bool = False, ord: float | str | None = "fro"
) -> Tensor:
    """Norms of matrices.

    Args:
        x: Floats ``[..., rows, columns]``.
        keepdims: Whether the last two axes stay, with size 1.
        ord: ``fro``, ``nuc``, 1, -1, 2, -2, infinity or minus infinity.

    Raises:
        ValueError: Another order.
    """
    _matrices("matrix_norm", x)
    if ord is None or ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in (1, -1, math.inf, -math.inf):
        sums = sum(F.abs(x), axis=-2 if abs(ord) == 1 else -1)
        result = (max if ord > 0 else min)(sums, axis=-1)
    elif ord in ("nuc", 2, -2):
        result = (sum if ord == "nuc" else max if ord == 2 else min)(svdvals(x), axis=-1)
    else:
        raise ValueError(
            f"matrix_norm: ord is {ord!r}, expected 'fro', 'nuc', 1, -1, 2, -2, inf or -inf"
        )
    return result.reshape([*shape_of(result), 1, 1]) if keepdims else result


def matrix_power(x: Tensor, n: int, /) -> Tensor:
    """A power of square matrices; of a negative exponent that of the inverse."""
    _matrices("matrix_power", x, square=True)
    if n < 0:
        x, n = inv(x), -n
    result = F.broadcast_to(eye(shape_of(x)[-1], dtype=x.dtype), list(x.shape)) if not n else None
    # squares of x for the bits of n, the lowest first
    while n:
        if n & 1:
            result = x if result is None else result @ x
        n >>= 1
        x = x @ x if n else x
    assert result is not None
    return result


def matrix_rank(x: Tensor, /, *, rtol: float | Tensor | None = None) -> Tensor:
    """The number of singular values above `rtol` times the greatest one; by default epsilon times the greater size."""
    values = svdvals(x)
    if not shape_of(values)[-1]:
        return zeros_like(sum(values, axis=-1), dtype=DType.int64)
    return count_nonzero(values > _cutoff(x, values, rtol), axis=-1)


def _cutoff(x: Tensor, values: Tensor, rtol: float | Tensor | None) -> Tensor:
    if rtol is None:
        rtol = builtins.max(shape_of(x)[-2:]) * float(finfo(x.dtype).eps)
    elif isinstance(rtol, Tensor) and rtol.rank:
        rtol = rtol.unsqueeze(-1)
    return max(values, axis=-1, keepdims=True) * rtol


def outer(x1: Tensor, x2: Tensor, /) -> Tensor:
    """The products of all pairs of elements of two vectors."""
    if x1.rank != 1 or x2.rank != 1:
        raise ValueError(f"outer: the operands have rank {x1.rank} and {x2.rank}, expected 1")
    return x1.unsqueeze(-1) * x2


def pinv(x: Tensor, /, *, rtol: float | Tensor | None = None) -> Tensor:
    """The pseudo-inverses (Moore, Penrose): singular values up to `rtol` times the greatest count as 0."""
    left, values, right = svd(x, full_matrices=False)
    if not shape_of(values)[-1]:
        return zeros_like(x.mT)
    kept = values > _cutoff(x, values, rtol)
    inverse = F.where(kept, 1.0 / F.where(kept, values, 1.0), 0.0).cast(x.dtype)
    return (right.mT * inverse.unsqueeze(-2)) @ left.mT


def qr(x: Tensor, /, *, mode: str = "reduced") -> QRResult:
    """Orthonormal columns and upper triangles whose products are the matrices.

    Args:
        x: Floats ``[..., rows, columns]``.
        mode: ``reduced`` for ``min(rows, columns)`` orthonormal columns, ``complete`` for as many as rows.

    Raises:
        ValueError: Another mode.
    """
    if mode not in ("reduced", "complete"):
        raise ValueError(f"qr: mode is {mode!r}, expected 'reduced' or 'complete'")
    stack, top = _scale_matrices(_matrices("qr", x))
    rows = factorizations.qr_of_rows(stack.mT, mode == "complete")
    q, r = rows[0].mT, rows[1][..., : shape_of(rows[0])[1]].mT
    return QRResult(_like(x, q), _like(x, r * top))


def slogdet(x: Tensor, /) -> SlogdetResult:
    """The signs of the determinants, and the logarithms of their magnitudes, which are minus infinity of 0."""
    factors, _, signs = factorizations.lu(_matrices("slogdet", x, square=True))
    elements = diagonal(factors)
    # a sum of logarithms, as the product may overflow
    logarithms = sum(F.log(F.abs(elements)), axis=-1)
    return SlogdetResult(_like(x, prod(sign(elements), axis=-1) * signs), _like(x, logarithms))


def solve(x1: Tensor, x2: Tensor, /) -> Tensor:
    """The solutions of linear equations.

    Args:
        x1: Floats ``[..., n, n]``.
        x2: The right sides: ``[n]``, or ``[..., n, columns]``, whose leading axes broadcast with those of `x1`.

    Raises:
        ValueError: The sizes do not fit; or a matrix is singular, when it is computed.
    """
    dtype = result_type(x1, x2)
    x1, right = astype(x1, dtype, copy=False), astype(x2, dtype, copy=False)
    right = right.unsqueeze(-1) if x2.rank == 1 else right
    _matrices("solve", x1, square=True)
    stack = _matrices("solve", right)
    n, columns = shape_of(right)[-2:]
    if n != shape_of(x1)[-1]:
        raise ValueError(
            f"solve: the matrices are {list(shape_of(x1))}, the right sides {list(shape_of(x2))}; expected as many rows"
        )
    lead = np.broadcast_shapes(shape_of(x1)[:-2], shape_of(right)[:-2])
    matrices = F.broadcast_to(x1, [*lead, n, n])
    factors, order, _ = factorizations.lu(_matrices("solve", matrices))
    stack = _matrices("solve", F.broadcast_to(right, [*lead, n, columns]))
    result = _like(matrices, factorizations.solve_factored(factors, order, stack))
    return result.squeeze(-1) if x2.rank == 1 else result


def svd(x: Tensor, /, *, full_matrices: builtins.bool = True) -> SVDResult:
    """Singular values and vectors.

    Args:
        x: Floats ``[..., rows, columns]``.
        full_matrices: Whether there are as many left vectors as rows, and as many right ones as columns; else
            ``min(rows, columns)`` of each.

    Raises:
        ValueError: At the run: a matrix has elements that are not finite.
    """
    rows, columns = shape_of(x)[-2:] if x.rank > 1 else (0, 0)
    # of the transposed matrices, left and right vectors change places
    if rows < columns:
        left, values, right = svd(x.mT, full_matrices=full_matrices)
        return SVDResult(right.mT, values, left.mT)
    stack, top = _scale_matrices(_matrices("svd", x))
    rotated, rotations = factorizations.orthogonal_rows(stack.mT)
    # each rotated column is a left vector times its singular value
    values = F.sqrt(sum(rotated * rotated, axis=-1))
    order = argsort(values, axis=-1, descending=True)
    values, rotated, rotations = (
        take_along_axis(values, order),
        _rows(rotated, order),
        _rows(rotations, order),
    )
    left = rotated
    if columns:
        # rows of rounding errors are no directions: the completion has others
        kept = values > values[:, :1] * (rows * float(finfo(DType.float64).eps))
        left = F.where(kept.unsqueeze(-1), rotated / F.where(kept, values, 1.0).unsqueeze(-1), 0.0)
        completion = factorizations.qr_of_rows(left, True)[0]
        left = F.where(kept.unsqueeze(-1), left, completion[:, :columns])
        if full_matrices and rows > columns:
            left = F.concat([left, completion[:, columns:]], axis=1)
    elif full_matrices:
        left = F.broadcast_to(eye(rows, dtype=DType.float64), (shape_of(stack)[0], rows, rows))
    return SVDResult(_like(x, left.mT), _like(x, values * top.squeeze(-1)), _like(x, rotations))


def svdvals(x: Tensor, /) -> Tensor:
    """The singular values in descending order; see `svd`."""
    return svd(x, full_matrices=False).S


def trace(x: Tensor, /, *, offset: int = 0, dtype: DType | None = None) -> Tensor:
    """The sums of diagonals; small integers are summed in 64 bits."""
    return sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def vector_norm(
    x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False, ord: float = 2
) -> Tensor:
    """Norms of vectors along axes.

    Args:
        x: Floats.
        axis: An axis, or several, which are one vector; None for all.
        keepdims: Whether the axes stay, with size 1.
        ord: The order: a number; 0 counts the elements that are not 0, infinities take the greatest and least.
    """
    if not x.dtype.is_float():
        raise TypeError(f"vector_norm: the operand is {x.dtype.name}, expected floats")
    axes = axes_of(x, axis)
    magnitudes = F.abs(x)
    if ord in (math.inf, -math.inf):
        return (max if ord > 0 else min)(magnitudes, axis=axes, keepdims=keepdims)
    if ord == 0:
        return count_nonzero(x, axis=axes, keepdims=keepdims).cast(x.dtype)
    if ord == 2:
        return F.sqrt(sum(x * x, axis=axes, keepdims=keepdims))
    total: Any = sum(magnitudes if ord == 1 else magnitudes**ord, axis=axes, keepdims=keepdims)
    return total if ord == 1 else total ** (1 / ord)
