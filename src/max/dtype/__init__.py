"""Element types of tensors, and their NumPy, ml_dtypes and torch counterparts.

::

    import numpy as np
    from max.dtype import DType

    array = np.zeros((2, 3), dtype=DType.float32.to_numpy())
    assert DType.from_numpy(array.dtype) is DType.float32
    assert DType.bfloat16.is_float() and DType.float64.size_in_bytes == 8
"""

from __future__ import annotations

import builtins
from enum import Enum, EnumMeta
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from max._spelling import did_you_mean

if TYPE_CHECKING:
    import torch

__all__ = ["DType", "finfo"]


class _Names(EnumMeta):
    """Raises errors for unknown names that list the names that exist."""

    def __getattr__(cls, name: str) -> Any:
        if name in cls._member_map_:
            return cls._member_map_[name]
        if name.startswith("_"):
            raise AttributeError(name)
        hint = did_you_mean(name, cls._member_map_)
        if name.startswith("complex"):
            hint = "; complex numbers are pairs of floats (max.graph.ops.as_interleaved_complex)"
        raise AttributeError(f"{cls.__name__} has no {name!r}{hint}", name=name)


class DType(Enum, metaclass=_Names):
    """The tensor data type.

    Members compare by identity and hash fast. ``DType(81)``, ``DType("float32")`` and ``DType("f32")`` are
    ``DType.float32``.
    """

    bool = 1

    int8 = 135
    uint8 = 134
    int16 = 137
    uint16 = 136
    int32 = 139
    uint32 = 138
    int64 = 141
    uint64 = 140

    float4_e2m1fn = 64
    float6_e2m3fn = 65
    float6_e3m2fn = 66
    float8_e8m0fnu = 73
    float8_e4m3fn = 75
    float8_e4m3fnuz = 76
    float8_e5m2 = 77
    float8_e5m2fnuz = 78
    float16 = 79
    bfloat16 = 80
    float32 = 81
    float64 = 82

    # members are singletons; Enum's own hash is a Python function, slow as a dictionary key
    __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value: object) -> DType | None:
        if not isinstance(value, str):
            return None
        return cls.__members__.get(value) or _FROM_MLIR.get(value)

    def __repr__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return f"DType.{self.name}"

    @property
    def align(self) -> int:
        """The alignment in bytes that values of this type need in memory."""
        return _NUMPY[self].alignment

    @property
    def size_in_bits(self) -> int:
        """The number of bits of a value; 4 and 6 for the floats of less than a byte, 8 for ``bool``."""
        return _SUBBYTE_BITS.get(self) or 8 * _NUMPY[self].itemsize

    @property
    def size_in_bytes(self) -> int:
        """The number of bytes that a value takes in memory; 1 for the floats of 4 and 6 bits."""
        return _NUMPY[self].itemsize

    def is_integral(self) -> builtins.bool:
        """Whether this is a signed or unsigned integer type; ``bool`` is not."""
        return self in _SIGNED or self in _UNSIGNED

    def is_signed_integral(self) -> builtins.bool:
        """Whether this is a signed integer type."""
        return self in _SIGNED

    def is_unsigned_integral(self) -> builtins.bool:
        """Whether this is an unsigned integer type; ``bool`` is not."""
        return self in _UNSIGNED

    def is_float(self) -> builtins.bool:
        """Whether this is a floating-point type, of any width."""
        return self in _FLOAT

    def is_float8(self) -> builtins.bool:
        """Whether this is one of the 8-bit floating-point types."""
        return self in _FLOAT8

    def is_half(self) -> builtins.bool:
        """Whether this is a 16-bit floating-point type: ``float16`` or ``bfloat16``."""
        return self is DType.float16 or self is DType.bfloat16

    @staticmethod
    def from_numpy(dtype: npt.DTypeLike) -> DType:
        """Converts a NumPy dtype, of NumPy itself or of ml_dtypes, to the corresponding DType.

        Args:
            dtype: The NumPy dtype, or what ``np.dtype`` accepts, such as ``np.float32``.

        Raises:
            ValueError: No DType corresponds, such as for strings, complex numbers and types in
                the byte order of another machine.
        """
        if dtype is None:  # NumPy takes it for float64  # pyright: ignore[reportUnnecessaryComparison]
            raise ValueError("DType.from_numpy: None is not a NumPy dtype")
        try:
            normal = np.dtype(dtype)
        except TypeError as error:
            raise ValueError(f"DType.from_numpy: {dtype!r} is not a NumPy dtype") from error
        if (member := _FROM_NUMPY.get(normal)) is not None:
            return member
        if not normal.isnative and normal.newbyteorder("=") in _FROM_NUMPY:
            raise ValueError(
                f"DType.from_numpy: {normal} is not in this machine's byte order; convert with "
                f"array.astype({normal.newbyteorder('=').name!r})"
            )
        names = ", ".join(member.name for member in DType)
        raise ValueError(f"DType.from_numpy: unsupported NumPy dtype {normal}; expected {names}")

    def to_numpy(self) -> np.dtype[Any]:
        """The corresponding NumPy dtype; from ml_dtypes for ``bfloat16`` and floats of 4 to 8 bits."""
        return _NUMPY[self]

    @staticmethod
    def from_torch(dtype: torch.dtype, _error: Exception | None = None) -> DType:
        """Converts a torch dtype to the corresponding DType. Does not import torch.

        Args:
            dtype: The torch dtype.
            _error: Raised if given: the error of the caller's attempt to import torch.

        Raises:
            ValueError: No DType corresponds, such as for complex and quantized types.
        """
        if _error is not None:
            raise _error
        if type(dtype).__module__ != "torch" or type(dtype).__name__ != "dtype":
            raise ValueError(f"DType.from_torch: {dtype!r} is not a torch.dtype")
        name = str(dtype).removeprefix("torch.")
        member = DType.__members__.get(name)
        if member is None:
            raise ValueError(f"DType.from_torch: unsupported torch dtype {dtype}")
        return member

    def to_torch(self, _error: Exception | None = None) -> torch.dtype:
        """The corresponding torch dtype. Imports torch.

        Args:
            _error: Raised if given: the error of the caller's attempt to import torch.

        Raises:
            ImportError: torch is not installed.
            ValueError: torch has no such type: ``float4_e2m1fn`` exists there only in pairs, 6-bit floats do not.
        """
        if _error is not None:
            raise _error
        import torch  # an optional package

        torch_dtype = getattr(torch, self.name, None)
        if torch_dtype is None:
            raise ValueError(f"{self}.to_torch: torch {torch.__version__} has no such dtype")
        return torch_dtype

    @property
    def _mlir(self) -> str:
        """The name of the type in the ``mo`` dialect: ``f32``, ``si64``, ``ui8``, ``bool``, …"""
        return _MLIR[self]

    @staticmethod
    def _from_mlir(name: str) -> DType:
        """The inverse of ``_mlir``.

        Raises:
            ValueError: No type has that name.
        """
        dtype = _FROM_MLIR.get(name)
        if dtype is None:
            raise ValueError(f"{name!r} is not an element type; expected {', '.join(_FROM_MLIR)}")
        return dtype


_SIGNED = frozenset({DType.int8, DType.int16, DType.int32, DType.int64})
_UNSIGNED = frozenset({DType.uint8, DType.uint16, DType.uint32, DType.uint64})
_FLOAT8 = frozenset({member for member in DType if member.name.startswith("float8")})
_SUBBYTE_BITS = {DType.float4_e2m1fn: 4, DType.float6_e2m3fn: 6, DType.float6_e3m2fn: 6}
_FLOAT = (
    _FLOAT8 | set(_SUBBYTE_BITS) | {DType.float16, DType.bfloat16, DType.float32, DType.float64}
)

_NUMPY: dict[DType, np.dtype[Any]] = {
    member: np.dtype(getattr(ml_dtypes, member.name, None) or member.name) for member in DType
}
_FROM_NUMPY: dict[np.dtype[Any], DType] = {numpy: member for member, numpy in _NUMPY.items()}


def _mlir_name(dtype: DType) -> str:
    if dtype is DType.bool:
        return "bool"
    prefixes = {"uint": "ui", "int": "si", "bfloat": "bf", "float": "f"}
    prefix = next(p for p in prefixes if dtype.name.startswith(p))
    return prefixes[prefix] + dtype.name.removeprefix(prefix).replace("_", "")


_MLIR: dict[DType, str] = {member: _mlir_name(member) for member in DType}
_FROM_MLIR: dict[str, DType] = {name: member for member, name in _MLIR.items()}


class finfo:
    """The limits of a floating-point type, as ``numpy.finfo``.

    Args:
        dtype: The type.

    Raises:
        TypeError: It is not a floating-point type.
    """

    dtype: DType
    """The type."""
    bits: int
    """The number of bits of a value."""
    eps: float
    """The distance from 1 to the next greater value."""
    max: float
    """The greatest finite value."""
    min: float
    """The smallest finite value."""
    tiny: float
    """The smallest positive value of full precision."""

    def __init__(self, dtype: DType) -> None:
        if not isinstance(dtype, DType) or not dtype.is_float():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"finfo: the type is {dtype!r}, expected a floating-point type")
        limits = cast("Any", ml_dtypes.finfo)(dtype.to_numpy())
        self.dtype, self.bits = dtype, dtype.size_in_bits
        self.eps, self.tiny = float(limits.eps), float(limits.smallest_normal)
        self.max, self.min = float(limits.max), float(limits.min)

    @property
    def smallest_normal(self) -> float:
        """:attr:`tiny` by NumPy's other name."""
        return self.tiny

    def __repr__(self) -> str:
        return (
            f"finfo(dtype={self.dtype.name}, bits={self.bits}, eps={self.eps}, max={self.max}, min={self.min}, "
            f"tiny={self.tiny})"
        )
