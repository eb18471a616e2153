"""The properties of a processor that kernels query: vector widths, registers, special instructions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from max.kernel.types import scalar_type

__all__ = ["LLVMTarget", "Target"]


class Target(ABC):
    """A processor to compile for.

    The kernel language and the compiler use this interface only. A subclass stands for a kind of processor; two targets
    that are equal compile to equal code. Capabilities that a subclass does not define are absent.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """A short name for printed IR: the kind of processor, and the capabilities that kernels query.

        It is part of a kernel's key, so kernels for targets of different names are different kernels.
        """

    @property
    @abstractmethod
    def cache_key(self) -> str:
        """Everything that the code of a program depends on, for the disk cache."""

    @property
    @abstractmethod
    def vector_bits(self) -> int:
        """Bits of a vector register."""

    @property
    @abstractmethod
    def registers(self) -> int:
        """Vector registers."""

    def width(self, dtype: Any) -> int:
        """Lanes of ``dtype`` in a vector register."""
        return max(self.vector_bits // (8 * scalar_type(dtype).size), 1)

    def has(self, feature: str) -> bool:
        """Whether code may use a feature, by LLVM's name (``"avx512bf16"``)."""
        return False

    @property
    def has_fma(self) -> bool:
        """Whether a fused multiply-add is one instruction."""
        return True

    @property
    def has_f16_conversion(self) -> bool:
        """Whether f16 converts to and from f32 by an instruction."""
        return True

    def dot_bf16_lanes(self, width: int) -> int:
        """Lanes that one instruction of ``k.dot_bf16`` takes of ``width``; 0 if there is no such instruction."""
        return 0

    def dot_i8_lanes(self, width: int) -> int:
        """Lanes that one instruction of ``k.dot_i8`` takes of ``width`` for an unsigned ``a``; 0 if there is none."""
        return 0

    def narrow_dot_i8_lanes(self, width: int) -> int:
        """Lanes that a pair of 16-bit multiply-adds takes of ``width`` in a narrow ``k.dot_i8``; 0 if there is none."""
        return 0

    def narrow_signed_dot_i8_lanes(self, width: int) -> int:
        """Lanes that ``vpsignb`` takes of ``width`` in a narrow ``k.dot_i8`` of a signed ``a``; 0 if there is none."""
        return 0

    def signed_dot_i8_lanes(self, width: int) -> int:
        """Lanes that the instructions of ``k.dot_i8`` take of ``width`` for a signed ``a``; 0 if there are none."""
        return 0

    @property
    def shifts_bytes(self) -> bool:
        """Whether bytes are shifted by one instruction, which does not wait for the units of products."""
        return False

    @property
    def signed_bytes(self) -> bool:
        """Whether ``k.dot_i8`` has instructions for signed ``a`` only."""
        return False

    def permutes(self, width: int) -> bool:
        """Whether one instruction of ``k.permute`` takes vectors of ``width`` lanes."""
        return False

    def lookup_lanes(self, width: int) -> int:
        """Bytes that one instruction of ``k.lookup`` takes of ``width``; 0 if there is none."""
        return 0

    @property
    def tile_instructions(self) -> bool:
        """Whether matrix tiles are registers, and their products instructions."""
        return False

    @property
    def tile_products(self) -> bool:
        """Whether kernels should multiply matrix tiles."""
        return self.tile_instructions

    @property
    def batch_invariant(self) -> bool:
        """Whether kernels must sum each row of a result in an order independent of the number of rows."""
        return False

    @property
    def float_tile_products(self) -> bool:
        """Whether kernels should multiply floats in matrix tiles, whose order of summation differs."""
        return self.tile_products and not self.batch_invariant


class LLVMTarget(Target):
    """A processor that LLVM compiles for."""

    @property
    @abstractmethod
    def feature_string(self) -> str:
        """LLVM's ``target-features``."""

    triple: str
    """LLVM's target triple."""
    cpu: str
    """LLVM's name of the processor, for its scheduling model."""

    @property
    def is_x86(self) -> bool:
        """Whether the instruction set is x86-64."""
        return self.triple.startswith("x86_64")

    @property
    def is_arm64(self) -> bool:
        """Whether the instruction set is arm64."""
        return self.triple.startswith(("aarch64", "arm64"))
