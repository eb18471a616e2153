"""`max.dtype`: members of `DType`, their properties and conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from max.dtype import DType
from tests.differential.families._plain import plain_family

LATER = ("float6_e2m3fn", "float6_e3m2fn", "float8_e8m0fnu")


def each(function: Callable[[DType], Any]) -> list[tuple[str, str]]:
    """A function's result for each member that the reference has, or the class of its error."""
    return _results(function, [member for member in DType if member.name not in LATER])


def later(function: Callable[[DType], Any]) -> list[tuple[str, str]]:
    """A function's result for each member that 26.x has and the reference has not."""
    return _results(function, [getattr(DType, name) for name in LATER])


def _results(function: Callable[[DType], Any], members: list[DType]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for member in members:
        try:
            found.append((member.name, str(function(member))))
        except Exception as error:
            found.append((member.name, type(error).__name__))
    return sorted(found)


PROGRAMS = r"""
each(lambda m: m.value)
each(lambda m: m.align)
each(lambda m: m.size_in_bytes)
each(lambda m: m.size_in_bits)
each(lambda m: m.is_float())
each(lambda m: m.is_float8())
each(lambda m: m.is_half())
each(lambda m: m.is_integral())
each(lambda m: m.is_signed_integral())
each(lambda m: m.is_unsigned_integral())
each(lambda m: m.to_numpy())
each(lambda m: D.from_numpy(m.to_numpy()))
each(lambda m: repr(m))
each(lambda m: str(m))
each(lambda m: f"{m}")
later(lambda m: m.value)
later(lambda m: m.align)
later(lambda m: m.size_in_bytes)
later(lambda m: m.size_in_bits)
later(lambda m: m.is_float())
later(lambda m: m.is_float8())
later(lambda m: m.is_half())
later(lambda m: m.is_integral())
later(lambda m: m.is_signed_integral())
later(lambda m: m.is_unsigned_integral())
later(lambda m: m.to_numpy())
later(lambda m: D.from_numpy(m.to_numpy()))
later(lambda m: repr(m))
later(lambda m: str(m))
later(lambda m: f"{m}")
D.float32.to_numpy()
D.bool.to_numpy()
D.bfloat16.to_numpy()
D.from_numpy(np.float32)
D.from_numpy(np.dtype('float32'))
D.from_numpy('float32')
D.from_numpy(float)
D.from_numpy(int)
D.from_numpy(bool)
D.from_numpy(np.bool_)
D.from_numpy(np.complex64)
D.from_numpy(np.dtype('>f4'))
D.from_numpy(None)
D.from_numpy(3)
D.from_numpy(np.object_)
D.from_numpy(np.dtype('S1'))
D.from_numpy(np.longdouble)
D.from_numpy(np.intp)
D.from_numpy(np.intc)
D(81)
D(1)
D(0)
D("float32")
D["float32"]
D["foo"]
D.float32=="float32"
D.float32==81
D.float32=="f32"
D.float32 in {D.float32:1}
D.float32<D.float64
int(D.float32)
D.float32.value
D.float32.name
D.f32
D.float
D.int
D.uint4
D.float32.is_numeric()
len(list(D))>15
D._missing_("f32")
import copy; copy.copy(D.float32) is D.float32
import copy; copy.deepcopy(D.float32) is D.float32
import pickle; pickle.loads(pickle.dumps(D.float32)) is D.float32
isinstance(D.float32,int)
bool(D.float32)
np.zeros(2,D.float32.to_numpy())
np.zeros(2,D.float32)
D.is_float(D.int32)
D.to_numpy(D.float32)
D.float32.size_in_bytes*3
"""

FAMILY = plain_family(
    PROGRAMS, {"np": np, "D": DType, "DType": DType, "each": each, "later": later}
)
