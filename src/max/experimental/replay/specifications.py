"""Specifications of the arguments of the calls of a trace.

Values of a trace are numbered in the order of the calls: the tensors in memory that a call reads first, then its
results. An argument is matched by a specification:

- an int: the value of that number;
- a `CellType` or `VaryingLeaf`: a tensor in memory of this type, which becomes the next value;
- a tuple of one: a constant, see `same_constant`; a `VaryingNumber`: a number with a symbol;
- a `Nested`: a list, tuple or slice of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from max.experimental.programs.number_patterns import Symbol
from max.experimental.programs.value_types import Kind
from max.graph.dim import StaticDim

__all__ = ["Nested", "VaryingLeaf", "VaryingNumber", "same_constant", "is_number"]


class Nested(NamedTuple):
    """The specification of a list, tuple or slice."""

    cls: type
    items: tuple[Any, ...]


class VaryingLeaf(NamedTuple):
    """The specification of a tensor in memory of which sizes vary."""

    kind: Kind
    dims: tuple[int | float | Symbol, ...]


class VaryingNumber(NamedTuple):
    """The specification of a number that varies."""

    symbol: Symbol
    cls: type
    """int or float."""


def same_constant(value: Any, constant: Any) -> bool:
    """Whether an argument stages the same as a constant of a trace that is another object."""
    kind = type(value)
    if isinstance(value, StaticDim):
        value, kind = int(value), int
    if isinstance(constant, StaticDim):
        constant = int(constant)
    if kind is not type(constant):
        return False
    if kind is float:
        # 0.0 equals -0.0
        return value == constant and (value != 0.0 or value.hex() == constant.hex())
    if isinstance(value, np.generic):
        return value.dtype == constant.dtype and value.tobytes() == constant.tobytes()
    try:
        hash(value)
    except TypeError:
        return False  # a mutable object: its content may have changed
    return bool(value == constant)


def is_number(value: Any) -> bool:
    """Whether an argument is one of its call's numbers: see `max.experimental.programs.argument_trees.describe`."""
    kind = type(value)
    if kind is float:
        return value != 0.0 and not math.isnan(value)
    return kind is int or isinstance(value, StaticDim)
