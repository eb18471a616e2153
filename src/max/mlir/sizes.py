"""Sizes in the compiler: an int for a static dim, else a `DimExpr`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from max.mlir.dims import DimExpr, FloorDiv

__all__ = [
    "Size",
    "Sizes",
    "contiguous_strides",
    "divide",
    "nominal",
    "product",
    "simplify",
    "size_function",
    "substitute",
]

Size = int | DimExpr
Sizes = tuple[Size, ...]

NOMINAL = 128
"""The value assumed for a symbol when heuristics compare symbolic sizes; never affects results."""


def simplify(dim: Size) -> Size:
    """A static expression as an int; other sizes as they are."""
    if isinstance(dim, DimExpr) and dim.is_static:
        return dim.value
    return dim


def product(dims: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    total: Size = 1
    for dim in dims:
        total = total * dim
    return simplify(total)


def contiguous_strides(shape: Sequence[Size]) -> Sizes:
    """Row-major strides, in elements.

    Axes outside of an empty one keep strides other than 0: a stride of 0 means that values do not vary along an axis.
    """
    strides: list[Size] = []
    step: Size = 1
    for dim in reversed(shape):
        strides.append(step)
        if dim != 0:
            step = simplify(step * dim)
    return tuple(reversed(strides))


def divide(total: Size, divisor: Size) -> Size | None:
    """``total / divisor`` if that is exact for all values of the symbols, else None."""
    if isinstance(total, int) and isinstance(divisor, int):
        return total // divisor if divisor and total % divisor == 0 else None
    quotient = DimExpr.of(total).exact_quotient(divisor)
    return None if quotient is None else simplify(quotient)


def substitute(size: Size, env: Mapping[str, Size]) -> Size:
    """The size with symbols replaced."""
    return size if isinstance(size, int) else simplify(size.substitute(env))


def nominal(size: Size) -> int:
    """A plausible value, for heuristics that compare sizes."""
    if isinstance(size, int):
        return size
    return size.evaluate(dict.fromkeys(size.symbols, NOMINAL))


def _text(expr: DimExpr, names: Mapping[str, str]) -> str:
    """The Python text of a dim, with the names of its symbols."""
    parts = list[str]()
    for monomial, coefficient in expr.terms:
        factors = [str(coefficient)] if coefficient != 1 or not monomial else []
        for atom, power in monomial:
            if isinstance(atom, FloorDiv):
                divisor = _text(atom.denominator, names)
                if not atom.denominator.is_static:
                    # checks reject 0; the sizes computed along with them must not raise
                    divisor = f"({divisor}) or 1"
                factor = f"(({_text(atom.numerator, names)})//({divisor}))"
            else:
                factor = names[atom]
            factors.extend([factor] * power)
        parts.append("*".join(factors))
    return "+".join(parts) or "0"


def size_function(
    sizes: Sequence[Size], symbols: Sequence[str]
) -> Callable[[Sequence[int]], list[int]]:
    """A compiled function from the values of `symbols`, in order, to the values of `sizes`.

    Args:
        sizes: The sizes to compute.
        symbols: The names of all symbols that occur in them.
    """
    names = {name: f"s{index}" for index, name in enumerate(symbols)}
    texts = [str(size) if isinstance(size, int) else _text(size, names) for size in sizes]
    unpack = f"    {', '.join(names.values())}, = s\n" if names else ""
    source = f"def sizes(s):\n{unpack}    return [{', '.join(texts)}]\n"
    scope: dict[str, Callable[[Sequence[int]], list[int]]] = {}
    exec(compile(source, "<sizes>", "exec"), scope)
    return scope["sizes"]
