"""The kernel library of the CPU: for each op the file that holds its kernel."""

from __future__ import annotations

from max._backends.kernel_library import KernelLibrary

__all__ = ["CPU_KERNELS"]

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
    "mo.trees.masks": "numeric.trees",
    "mo.trees.walk": "numeric.trees",
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
    "mok.code": "products.dense.coding",
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
    {name: f"max._backends.cpu.kernels.{family}" for name, family in _CPU_FAMILIES.items()}
)
"""The kernels of CPUs."""
