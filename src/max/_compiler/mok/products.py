"""Products in the `mok` dialect, and base classes of the ops that backends add; see `max._compiler.mok`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from xdsl.ir import Attribute

from max._dataclass import dataclass
from max.mlir import MoOp, OpSpec, TensorType
from max.mlir.operation import Attrs
from max.mlir.ops import matmul as staged
from max.mlir.ops.matmul import product_flops

__all__ = ["MatmulOp", "PackingOp", "Piece", "ProductsOp", "parts_of"]


def _infer_matmul(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The result type of `mo.matmul`; with `transpose_b` the last two axes of y are exchanged first."""
    x, y = types
    if attrs["transpose_b"] and isinstance(y, TensorType):
        y = y.with_shape([*y.shape[:-2], y.shape[-1], y.shape[-2]])  # [n, k] as [k, n]
    infer = staged.MatmulOp.spec.infer
    assert infer is not None
    return infer((x, y), attrs)


class MatmulOp(MoOp):
    """`mo.matmul`, or with `transpose_b` the product with the second operand's last two axes transposed."""

    name = "mok.matmul"
    spec = OpSpec(
        "mok.matmul",
        (2, 2),
        1,
        attributes={"transpose_b": bool},
        infer=_infer_matmul,
        flops=product_flops,
        matmul=True,
        packable=True,
        takes_epilogue=True,
        separates=True,
    )


def parts_of(products: int, pairs: Sequence[int]) -> list[tuple[int, ...]]:
    """The products in groups that share strips of a packed weight: single products and pairs.

    Args:
        products: The number of products.
        pairs: The first of each pair.
    """
    # these are in the part of the product before them
    second = {first + 1 for first in pairs}
    return [(i, i + 1) if i in pairs else (i,) for i in range(products) if i not in second]


class ProductsOp(MoOp):
    """An op with several results in parts, whose kernel takes one epilogue for each part.

    A subclass has a `spec` with the attribute `pairs`; its kernel gets the attribute `parts`.
    """

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The results that one epilogue receives; see `parts_of`."""
        return parts_of(len(self.results), self.attr("pairs"))


@dataclass(frozen=True)
class Piece:
    """The part of the result of a `PackingOp` that one of its operands fills.

    Args:
        start: The first index along each axis of the result.
        shape: The size along each axis.
        attributes: The attributes of the kernel.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    attributes: Mapping[str, Any]


class PackingOp(MoOp):
    """An op with one launch for each operand, which writes a piece of the result."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """The piece of each operand."""
