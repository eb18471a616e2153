"""The library kernels: the interface from an op to its kernel.

A `KernelLibrary` belongs to a kind of device; `CPU_KERNELS` is the library of the CPU. The compiler calls
`library.lower(name, operands, results, attributes, target)` with

- `name`: the name of an op, such as `"mo.matmul"`;
- `operands` and `results`: `Operand(dtype, shape)` in the order of the op, **without chains**. A buffer is an operand
  like any other. Static dims are ints; symbolic dims may be any objects that multiply with `*`;
- `attributes`: the op's attributes as plain Python values;
- `target`: the processor that the kernel is compiled for.

The result is a `KernelCall`. To launch it, allocate its `workspaces`. For each `Arg` make a `k.TensorSpec(arg.dtype,
arg.spec_shape())`, and pass the pointer and each dim that is None in `spec_shape()`. Specialize `call.kernel` with
`call.params`. If `call.serial` is true, launch the kernel on one worker. Views are contiguous (those of `mok.attention`
may be strided), row-major, and aligned to their dtype only.

`mo.matmul` takes an attribute that the op does not have, `transpose_b` (default False): for
`mo.matmul(x, mo.transpose(w, perm=[1, 0]))` the compiler passes `w`, `[N, K]`, with `transpose_b=True`.

**Epilogues.** If `call.epilogue` is true, the kernel has a compile-time parameter `epilogue`, an `@k.inline` function

    def epilogue(v, row, col, mask, extra): return v

`v` is a `SIMD[f32, W]` (`SIMD[f64, W]` or an integer vector if the op's operands have that dtype) with the results in
columns `col … col+W-1` of row `row` of the result as `[rows, columns]`: `columns` is the last dim, `rows` the product
of the others. `mask` is None for a full vector (compile time), else a `SIMD[bool, W]`: pass it to `extra[i].load(…,
mask=mask)`. `extra` is the tuple of views that are passed after the kernel's own args. The value that the epilogue
returns is converted to the dtype of the result view; a fused cast therefore only needs a result `Operand` with its
dtype (and a replaced first `Arg`).

`mok.packed_products` and `mok.grouped_products` take the attribute `parts` (see `max._kernel_library.tiles.strips`).
They have one result for each stored value. Their epilogue takes the number of a part and a tuple of sums, and returns a
tuple: ``epilogue(part, sums, row, col, mask, extra)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from max._kernel_library.lowering import (
    Arg,
    KernelCall,
    Limit,
    Lowering,
    Operand,
    Scalar,
    Workspace,
)
from max.kernel import Target

__all__ = [
    "CPU_KERNELS",
    "Arg",
    "KernelCall",
    "KernelLibrary",
    "Limit",
    "Lowering",
    "Operand",
    "Scalar",
    "Workspace",
]


class KernelLibrary:
    """The kernels of one kind of device.

    Args:
        families: For each op its lowering, or the name of the module whose table `LOWERINGS` has it;
            modules are imported at their first use.
    """

    def __init__(self, families: Mapping[str, str | Lowering]) -> None:
        self.families = dict(families)

    def supports(self, name: str) -> bool:
        """Whether the library has a kernel for an op.

        Args:
            name: The op's name.
        """
        return name in self.families

    def register(self, name: str, lowering: Lowering) -> None:
        """Adds the kernel of an op.

        Args:
            name: The op's name, such as ``mo.gather``.
            lowering: Describes the launch, as `lower` does.

        Raises:
            ValueError: The library has a kernel for the op.
        """
        if name in self.families:
            raise ValueError(f"the library has a kernel for {name!r}")
        self.families[name] = lowering

    def lower(
        self,
        name: str,
        operands: Sequence[Operand],
        results: Sequence[Operand],
        attributes: Mapping[str, Any],
        target: Target,
    ) -> KernelCall:
        """Describes the launch that carries out an op.

        Args:
            name: The op's name.
            operands: The operands without chains.
            results: The results without chains.
            attributes: The op's attributes as Python values.
            target: The processor that the kernel will be compiled for.

        Raises:
            KeyError: The library has no kernel of that name.
            NotImplementedError: The kernel does not take these dtypes or attributes.
        """
        family = self.families.get(name)
        if family is None:
            names = ", ".join(sorted(self.families))
            raise KeyError(f"no library kernel for {name!r}; the library has {names}")
        if isinstance(family, str):
            lowerings: Mapping[str, Lowering] = import_module(family).LOWERINGS
            family = lowerings[name]
        return family(operands, results, attributes, target)


_CPU_FAMILIES: dict[str, str] = {
    "mo.matmul": "products.dense.matmul",
    "mo.attention.ragged": "attention.ragged_attention",
    "mo.attention.ragged.paged": "attention.paged_attention",
    "mo.kv_store.ragged.paged": "attention.kv_store",
    "mo.rope.ragged.paged": "attention.rope",
    "mo.kv_load.ragged.paged": "attention.cache_rows",
    "mo.k_store.ragged.paged": "attention.cache_rows",
    "mo.mla.prefill.ragged.paged": "attention.latent_prefill",
    "mo.latents.plan.ragged": "attention.latent_plan",
    "mo.tokens.select.ragged.paged": "attention.token_selection",
    "mo.attention.selected.paged": "attention.selected_attention",
    "mo.gated_delta.ragged": "recurrence.delta_rule",
    "mo.frequencies.update": "generation.frequencies",
    "mo.sample.token": "generation.sampling",
    "mo.penalties": "generation.penalties",
    "mo.next_step.ragged.paged": "generation.next_step",
    "mo.check.counts": "checks",
    "mo.check.offsets": "checks",
    "mo.gather": "indexing.gather",
    "mo.gather_nd": "indexing.gather",
    "mo.scatter": "indexing.scatter",
    "mo.scatter_reduce": "indexing.scatter",
    "mo.scatter_nd": "indexing.scatter",
    "mo.scatter_nd_reduce": "indexing.scatter",
    "mo.cumsum": "numeric.cumsum",
    "mo.top_k": "indexing.top_k",
    "mo.bottom_k": "indexing.top_k",
    "mo.argmax": "indexing.top_k",
    "mo.argmin": "indexing.top_k",
    "mo.pad": "indexing.movement",
    "mo.range": "indexing.movement",
    "mo.slice_dynamic": "indexing.movement",
    "mo.buffer_store_slice_dynamic": "indexing.movement",
    "mo.concat": "indexing.movement",
    "mo.argsort": "indexing.sorting",
    "mo.nonzero": "indexing.nonzero",
    "mo.conv": "convolution.conv",
    "mo.conv_transpose": "convolution.transposed",
    "mok.pack_filter": "convolution.conv",
    "mok.packed_conv": "convolution.conv",
    "mo.resize": "images.resize",
    "mo.fold": "images.fold",
    "mo.roi_align": "images.roi_align",
    "mo.nms": "images.suppression",
    "mo.streams.gates": "numeric.stream_gates",
    "mo.irfft": "numeric.fourier",
    "mo.random": "numeric.random",
    "mo.dequantize": "products.quantized.dequantize",
    "mo.quantize": "products.quantized.quantize",
    "mo.moe.indices": "indexing.experts",
    "mo.grouped_matmul.ragged": "products.dense.grouped",
    "mo.grouped_qmatmul.ragged": "products.quantized.grouped",
    "mok.grouped_products": "products.quantized.grouped",
    "mo.qmatmul": "products.quantized.qmatmul",
    "mo.qmatmul_gptq": "products.quantized.qmatmul",
    "mok.attention": "attention.dense_attention",
    "mok.pack": "products.quantized.packed",
    "mok.packed_matmul": "products.quantized.packed_matmul",
    "mok.packed_products": "products.quantized.packed_matmul",
    "mo.causal_conv.ragged": "recurrence.causal_conv",
    "mo.selective_scan.ragged": "recurrence.scan",
    "mo.ssd.ragged": "recurrence.scan",
    "mo.max_pool": "images.pooling",
    "mo.avg_pool": "images.pooling",
}
"""Op to the file that holds its kernels for CPUs."""

CPU_KERNELS = KernelLibrary(
    {name: f"max._kernel_library.{family}" for name, family in _CPU_FAMILIES.items()}
)
"""The kernels of CPUs."""
