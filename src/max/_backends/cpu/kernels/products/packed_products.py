"""Products with packed weights: the encoding of the weight chooses the family of kernels, which is loaded then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from max import kernel as k
from max._backends.cpu.kernels.products.int8.panels import ENCODINGS
from max._backends.cpu.kernels.products.quantized.packed import FORMATS
from max._backends.kernel_call import KernelCall, Operand
from max._lazy import lazy_module

if TYPE_CHECKING:
    from max._backends.cpu.kernels.products.dense import packed_matmul as dense
    from max._backends.cpu.kernels.products.int8 import packed_matmul as int8
    from max._backends.cpu.kernels.products.quantized import packed_matmul as quantized
else:
    # a model has weights of one or two encodings
    dense = lazy_module("max._backends.cpu.kernels.products.dense.packed_matmul")
    int8 = lazy_module("max._backends.cpu.kernels.products.int8.packed_matmul")
    quantized = lazy_module("max._backends.cpu.kernels.products.quantized.packed_matmul")

__all__ = ["LOWERINGS"]


def _lower_packed_matmul(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for a product with packed weights of any encoding; see `mok.packed_matmul` and `mok.packed_products`."""
    encoding: str = attributes["encoding"]
    if encoding in ENCODINGS:
        return int8.lower_matmul(operands, results)
    family = quantized if encoding in FORMATS else dense
    return family.lower_matmul(operands, results, attributes, target)


LOWERINGS = dict.fromkeys(
    ("mok.packed_matmul", "mok.packed_products", "mok.adapted_products"), _lower_packed_matmul
)
