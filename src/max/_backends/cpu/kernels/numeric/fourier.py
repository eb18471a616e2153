"""Inverse Fourier transforms to real numbers, of any length.

A task is a row. It is transformed by the algorithm of Stockham, which keeps the elements in order: one pass for each
factor of the length, from one half of the scratch memory to the other. Factors are 4 and primes; a pass of factor `p`
takes `p` complex products per element. Scratch memory is 4 `n` floats (16 KB for n = 1,024 in f32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.kernel_call import KernelCall, Operand, view


def factors(n: int) -> tuple[int, ...]:
    """The factors of a length: fours, then primes; none for 1.

    Args:
        n: The length.
    """
    factors: list[int] = []
    divisor = 4
    while n > 1:
        if n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        elif divisor == 4:
            divisor = 2
        elif divisor * divisor > n:  # no divisor up to its root: a prime
            divisor = n
        else:
            divisor += 1 if divisor == 2 else 2
    return tuple(factors)


def passes(n: int) -> tuple[tuple[int, int], ...]:
    """Each factor of a length with the product of those before it.

    Args:
        n: The length.
    """
    pairs: list[tuple[int, int]] = []
    done = 1
    for factor in factors(n):
        pairs.append((factor, done))
        done *= factor
    return tuple(pairs)


@k.inline
def transform_pass(
    to: k.View, data: k.View, roots: k.View, n: int, factor: int, stride: int, width: int
) -> None:
    """One pass of an inverse transform.

    Args:
        to: Real and imaginary parts: `[2, n]`.
        data: The operand, likewise.
        roots: `[n, 2]`: cosine and sine of the n-th parts of a circle.
        n: The length.
        factor: A factor of it.
        stride: The product of the factors before.
        width: Lanes of a vector.
    """
    groups = n // (factor * stride)
    for q in range(groups):
        for c in range(factor):
            for t, mask in k.vectors(stride, width):
                real = k.splat(to.dtype(0), width)
                imaginary = k.splat(to.dtype(0), width)
                for j in range(factor):
                    # an inverse transform: roots turn by positive angles
                    turn = c * (q * stride + j * (n // factor)) % n
                    cosine = k.cast(roots[turn, 0], to.dtype)
                    sine = k.cast(roots[turn, 1], to.dtype)
                    at = t + stride * (q + groups * j)
                    x = data.load(0, at, width=width, mask=mask)
                    y = data.load(1, at, width=width, mask=mask)
                    real += x * cosine - y * sine
                    imaginary += x * sine + y * cosine
                # in the order of the result: no reversal of digits follows
                place = t + stride * (factor * q + c)
                to.store(0, place, value=real, mask=mask)
                to.store(1, place, value=imaginary, mask=mask)


@k.kernel
def irfft(
    out: k.Output, x: k.Input, roots: k.Input, ctx: k.Context, *, n: int, scale: float
) -> None:
    """`out` `[outer, n, inner]` from the first half of its spectrum `x` `[outer, m, inner, 2]`; missing frequencies are
    0.
    """
    dtype = k.f64 if out.dtype.bits == 64 else k.f32
    width = ctx.target.width(dtype)
    scratch = ctx.scratch(dtype, (2, 2, n))
    half = n // 2
    for o, i in ctx.parallel((out.shape[0], out.shape[2])):
        for f in range(half + 1):
            real = dtype(0)
            imaginary = dtype(0)
            if f < x.shape[1]:
                real = k.cast(x[o, f, i, 0], dtype)
                imaginary = k.cast(x[o, f, i, 1], dtype)
            # the spectrum of real numbers is real at frequency 0, and at half the length
            if f == 0 or 2 * f == n:
                imaginary = dtype(0)
            scratch[0, 0, f] = real
            scratch[0, 1, f] = imaginary
            # of real numbers, frequency n - f is the conjugate of f
            if f > 0:
                scratch[0, 0, n - f] = real
                scratch[0, 1, n - f] = imaginary if 2 * f == n else -imaginary
        for number, (factor, stride) in enumerate(passes(n)):
            source = number % 2
            transform_pass(scratch[1 - source], scratch[source], roots, n, factor, stride, width)
        result = scratch[len(passes(n)) % 2, 0]
        for j in range(n):
            out[o, j, i] = result[j] * scale


def _lower_irfft(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.irfft`, on views `[before, axis, after]` with an axis of 2 for the operand."""
    x, roots = operands
    axis, n, rank = int(attributes["axis"]), int(attributes["n"]), len(x.shape)
    groups = (range(axis), (axis,), range(axis + 1, rank - 1))
    args = (
        view("result", 0, results[0], groups, static=False),
        view("operand", 0, x, (*groups, (rank - 1,)), static=False),
        view("operand", 1, roots, static=False),
    )
    scale = {"backward": 1 / n, "ortho": n**-0.5, "forward": 1.0}[attributes["normalization"]]
    return KernelCall(irfft, args, {"n": n, "scale": scale})


LOWERINGS = {"mo.irfft": _lower_irfft}
