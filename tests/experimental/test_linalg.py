"""The `linalg` extension of the array API, beside NumPy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max.dtype import DType
from max.experimental import Tensor
from max.experimental import array_api as xp

la = xp.linalg
Array = np.ndarray[Any, Any]
SQUARES = [
    ((3, 3), "float64"), ((1, 1), "float64"), ((0, 0), "float32"), ((2, 1, 17, 17), "float64"), ((0, 2, 2), "float64"),
    ((2, 5, 5), "float32"),
]  # fmt: skip
OTHERS = [
    ((3, 2), "float64"), ((1, 4), "float32"), ((0, 3), "float64"), ((3, 0), "float64"), ((2, 7, 4), "float64"),
    ((2, 4, 7), "float32"), ((1, 2, 13, 11), "float64"), ((2, 5, 5), "float64"),
]  # fmt: skip
STANDARD = set(
    "cholesky cross det diagonal eigh eigvalsh inv matmul matrix_norm matrix_power matrix_rank matrix_transpose outer "
    "pinv qr slogdet solve svd svdvals tensordot trace vecdot vector_norm".split()
)
"""The names of the extension in version 2024.12, without eig and eigvals, which are of 2025.12."""


def close(got: Any, want: Any, dtype: str = "float64") -> None:
    tolerance = 1e-10 if dtype == "float64" else 2e-4
    array = np.asarray(got)
    assert array.shape == np.shape(want), (array.shape, np.shape(want))
    np.testing.assert_allclose(array, want, rtol=tolerance, atol=tolerance)


def matrices(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def symmetric(x: Array) -> Array:
    return x + x.swapaxes(-1, -2)


def test_names_are_those_of_the_standard() -> None:
    assert set(la.__all__) == STANDARD


def test_arguments_are_those_of_the_standard() -> None:
    strict = pytest.importorskip("array_api_strict")
    for name in sorted(STANDARD):
        want = inspect.signature(getattr(strict.linalg, name)).parameters
        got = inspect.signature(getattr(la, name)).parameters
        keywords = {n for n, p in want.items() if p.kind is p.KEYWORD_ONLY}
        assert keywords <= set(got), name


SQUARE: dict[str, Callable[[Any, Any], Any]] = {
    "det": lambda m, x: m.det(x),
    "slogdet": lambda m, x: tuple(m.slogdet(x)),
    "inv": lambda m, x: m.inv(x),
    "matrix_power": lambda m, x: (
        m.matrix_power(x, 5),
        m.matrix_power(x, 0),
        m.matrix_power(x, -2),
    ),
}


@pytest.mark.parametrize(("shape", "dtype"), SQUARES)
def test_square_matrices(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    x = matrices(rng, shape, dtype) + 3 * np.eye(shape[-1], dtype=dtype)
    tensor = Tensor.constant(x)
    for name, call in SQUARE.items():
        got, want = call(la, tensor), call(np.linalg, x)
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        for one, expected in pairs:
            scale = np.abs(expected).max(initial=1.0, where=np.isfinite(expected))
            close(np.asarray(one) / scale, expected / scale, dtype)
            assert one.dtype is DType[dtype], name
    vector = rng.standard_normal(shape[-1]).astype(dtype)
    for right in (x[..., :2], vector, vector[:, None]):
        got = la.solve(tensor, Tensor.constant(np.ascontiguousarray(right)))
        close(got, np.linalg.solve(x, right), dtype)
    positive = x @ x.swapaxes(-1, -2) + np.eye(shape[-1], dtype=dtype)
    for upper in (False, True):
        got = la.cholesky(Tensor.constant(positive + np.triu(np.ones_like(x), 1)), upper=upper)
        want = np.linalg.cholesky(positive)
        close(got, want.swapaxes(-1, -2) if upper else want, dtype)
    both = symmetric(x)
    values, vectors = la.eigh(Tensor.constant(both + np.triu(np.ones_like(x), 1)))
    close(values, np.linalg.eigvalsh(both), dtype)
    v = vectors.to_numpy()
    close(v * np.asarray(values)[..., None, :], both @ v, dtype)
    close(v.swapaxes(-1, -2) @ v, np.broadcast_to(np.eye(shape[-1]), shape), dtype)
    close(la.eigvalsh(Tensor.constant(both)), np.linalg.eigvalsh(both), dtype)


def orthonormal(x: Array, dtype: str) -> None:
    close(
        x.swapaxes(-1, -2) @ x,
        np.broadcast_to(np.eye(x.shape[-1]), (*x.shape[:-2], *[x.shape[-1]] * 2)),
        dtype,
    )


@pytest.mark.parametrize(("shape", "dtype"), OTHERS)
def test_factors_of_any_matrices(
    shape: tuple[int, ...], dtype: str, rng: np.random.Generator
) -> None:
    x = matrices(rng, shape, dtype)
    for mode in ("reduced", "complete"):
        q, r = la.qr(Tensor.constant(x), mode=mode)
        want_q, want_r = np.linalg.qr(x, mode=mode)
        close(q, want_q, dtype)
        close(r, want_r, dtype)
    for full in (False, True):
        u, s, vh = (t.to_numpy() for t in la.svd(Tensor.constant(x), full_matrices=full))
        want = np.linalg.svd(x, full_matrices=full)
        assert (u.shape, vh.shape) == (want[0].shape, want[2].shape)
        close(s, want[1], dtype)
        orthonormal(u, dtype)
        orthonormal(vh.swapaxes(-1, -2), dtype)
        k = s.shape[-1]
        close((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], x, dtype)
    tensor = Tensor.constant(x)
    close(la.svdvals(tensor), np.linalg.svd(x, compute_uv=False), dtype)
    if not min(shape[-2:]):
        return
    close(la.pinv(tensor), np.linalg.pinv(x, rtol=1e-5), dtype)
    for ord in ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf):
        got = la.matrix_norm(tensor, ord=ord, keepdims=ord == 2)
        close(got, np.linalg.norm(x, ord, axis=(-2, -1), keepdims=ord == 2), dtype)


def test_matrices_of_less_than_full_rank(rng: np.random.Generator) -> None:
    low = rng.standard_normal((4, 9, 3)) @ rng.standard_normal((4, 3, 7))
    special = [
        np.zeros((4, 3)),
        np.ones((5, 5)),
        np.diag([1.0, 0.0, -2.0, 0.0]),
        np.eye(6)[:, ::-1],
        np.tri(40),
        *low,
    ]
    for x in [*special, low, low.swapaxes(-1, -2), low * 1e200, low * 1e-200]:
        u, s, vh = (t.to_numpy() for t in la.svd(Tensor.constant(np.ascontiguousarray(x))))
        top = max(np.abs(x).max(), 1e-300)
        close(s / top, np.linalg.svd(x / top, compute_uv=False))
        orthonormal(u, "float64")
        orthonormal(vh, "float64")
        k = s.shape[-1]
        close((u[..., :k] * (s / top)[..., None, :]) @ vh[..., :k, :], x / top)
        for rtol in (None, 1e-3):
            got = la.matrix_rank(Tensor.constant(np.ascontiguousarray(x)), rtol=rtol).to_numpy()
            np.testing.assert_array_equal(got, np.linalg.matrix_rank(x, rtol=rtol))
        q, r = (
            t.to_numpy() for t in la.qr(Tensor.constant(np.ascontiguousarray(x)), mode="complete")
        )
        orthonormal(q, "float64")
        close(q @ (r / top), x / top)
    pairs = np.linalg.qr(rng.standard_normal((9, 9)))[
        0
    ]  # eigenvalues that are equal, opposite and 0
    for both in (
        symmetric(special[1]) * 1e180,
        (pairs * [3, 3, -3, 0, 0, 1, -1, 2, 1e-9]) @ pairs.T,
    ):
        values, vectors = (
            t.to_numpy() for t in la.eigh(Tensor.constant(np.ascontiguousarray(both)))
        )
        top = np.abs(both).max()
        close(values / top, np.linalg.eigvalsh(both / top))
        orthonormal(vectors, "float64")
        close((vectors * (values / top)) @ vectors.T, both / top)


def test_products_diagonals_and_norms(rng: np.random.Generator) -> None:
    strict: Any = np.linalg
    x, y = rng.standard_normal((2, 3, 4)), rng.standard_normal((4, 3, 1))
    left, right = rng.standard_normal((4, 1, 3)), rng.integers(-9, 9, (2, 3)).astype(np.float64)
    close(la.cross(Tensor.constant(left), Tensor.constant(right)), strict.cross(left, right))
    whole = rng.integers(-9, 9, (3, 5)).astype(np.int32)
    got = la.cross(Tensor.constant(whole), Tensor.constant(whole[:, ::-1].copy()), axis=-2)
    np.testing.assert_array_equal(got.to_numpy(), strict.cross(whole, whole[:, ::-1], axis=-2))
    for offset in (-4, -2, -1, 0, 1, 3, 9):
        np.testing.assert_array_equal(
            la.diagonal(Tensor.constant(x), offset=offset).to_numpy(),
            strict.diagonal(x, offset=offset),
        )
        close(la.trace(Tensor.constant(x), offset=offset), strict.trace(x, offset=offset))
    small = rng.integers(0, 100, (5, 5)).astype(np.int8)
    assert la.trace(Tensor.constant(small)).dtype is DType.int64
    close(la.trace(Tensor.constant(small)), np.trace(small, dtype=np.int64))
    close(
        la.outer(Tensor.constant(x[0, 0]), Tensor.constant(y[:, 0, 0])),
        np.outer(x[0, 0], y[:, 0, 0]),
    )
    for ord in (2, 1, 0, 3, 0.5, -1, -2, math.inf, -math.inf):
        for axis in (None, 0, -1, (0, 2)):
            for keep in (False, True):
                got = la.vector_norm(Tensor.constant(x), axis=axis, keepdims=keep, ord=ord)
                want = strict.vector_norm(x, axis=axis, keepdims=keep, ord=ord)
                close(got, want)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: la.det(x[:2]), ValueError, r"det: the operand is \[2, 3\], expected square"),
        (lambda x: la.svd(x[0]), ValueError, r"svd: the operand is \[3\], expected matrices"),
        (
            lambda x: la.inv(x.cast(DType.int32)),
            TypeError,
            "inv: the operand is int32, expected floats",
        ),
        (lambda x: la.inv(x * 0).to_numpy(), ValueError, "matrix 0 of the stack is singular"),
        (
            lambda x: la.cholesky(-x).to_numpy(),
            ValueError,
            "matrix 0 of the stack is not positive definite",
        ),
        (lambda x: la.qr(x, mode="raw"), ValueError, "'raw', expected 'reduced'"),
        (lambda x: la.matrix_norm(x, ord=3), ValueError, "ord is 3, expected"),
        (lambda x: la.solve(x, x[:2]), ValueError, "expected as many rows"),
        (
            lambda x: la.cross(x[:2], x[:2], axis=-2),
            ValueError,
            r"axis -2 has sizes \[2\], expected 3",
        ),
        (lambda x: la.outer(x, x[0]), ValueError, "rank 2 and 1, expected 1"),
        (lambda x: xp.fft, AttributeError, "no dtype is complex"),
        (lambda x: xp.complex64, AttributeError, "no dtype is complex"),
        (lambda x: xp.sinus, AttributeError, "'sinus'"),
    ],
)
def test_what_does_not_fit(
    call: Callable[[Tensor], Any], error: type[Exception], message: str
) -> None:
    x = Tensor.constant(np.eye(3))
    with pytest.raises(error, match=message):
        call(x)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["svd", "svdvals", "eigh", "eigvalsh", "pinv", "matrix_rank"])
def test_matrices_that_are_not_finite(name: str, bad: float, rng: np.random.Generator) -> None:
    """No rotation is found for a NaN: the result would look like one."""
    stack = rng.standard_normal((3, 4, 4))
    stack[1, 2, 1] = bad
    with pytest.raises(ValueError, match="matrix 1 of the stack has elements that are not finite"):
        result = getattr(xp.linalg, name)(Tensor(stack))
        np.asarray(result[0] if isinstance(result, tuple) else result)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_upper_triangles_are_not_read(bad: float, rng: np.random.Generator) -> None:
    stack = rng.standard_normal((2, 5, 5))
    expected = np.linalg.eigvalsh(stack)
    stack[:, 1, 3] = bad
    got = np.asarray(xp.linalg.eigvalsh(Tensor(stack)))
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
