"""The ops of attention over a paged KV cache, of quantized products, of experts and of sampling.

A ragged batch holds the tokens of all sequences, concatenated; ``input_row_offsets`` (uint32 ``[batch + 1]``) holds the
first row of each sequence. The cache is a `PagedCacheValues`; ``layer_idx`` (uint32, rank 0) is the index of a layer in
it. New keys and values are written after the cached ones; the number of cached tokens changes only between executions.
"""

from __future__ import annotations

from max._names import lazy_names
from max.nn.kernels.adapters import sgmv_kernel, sgmv_lora_kernel, sgmv_qkv_lora_kernel
from max.nn.kernels.attention import (
    cross_attention_ragged,
    flash_attention_gpu,
    flash_attention_ragged,
    flash_attention_ragged_gpu,
)
from max.nn.kernels.cache import (
    k_cache_to_buffer,
    kv_cache_get_max_seq_len,
    kv_cache_ragged_radd,
    store_kv_cache_ragged,
)
from max.nn.kernels.experts import (
    grouped_dynamic_scaled_fp8_matmul,
    grouped_matmul_ragged,
    moe_create_indices,
)
from max.nn.kernels.float8 import (
    batched_dynamic_scaled_fp8_matmul,
    batched_quantize_dynamic_scaled_float8,
    convert_weights_to_fp8_fnuz_if_needed,
    dynamic_scaled_matmul,
    matmul_static_scaled_float8,
    needs_fp8_fnuz_conversion,
    normalize_e4m3fn_to_e4m3fnuz,
    quantize_dynamic_scaled_float8,
    quantize_static_scaled_float8,
)
from max.nn.kernels.indexing import scatter_set_constant
from max.nn.kernels.latents import (
    flare_mla_decode_ragged,
    flare_mla_decompress_k_cache,
    flare_mla_prefill_plan,
    flare_mla_prefill_ragged,
)
from max.nn.kernels.norms import rms_norm_key_cache
from max.nn.kernels.products import swish_glu
from max.nn.kernels.projections import (
    fused_qkv_ragged_matmul,
    fused_qkv_ragged_matmul_quantized,
    fused_qkv_ragged_matmul_scaled_float8,
    matmul_k_cache_ragged,
    matmul_k_cache_ragged_scaled_float8,
    matmul_kv_cache_ragged,
    unfused_qkv_ragged_matmul_gguf_quantized,
)
from max.nn.kernels.ragged import merge_ragged_tensors
from max.nn.kernels.rope import fused_qk_ragged_rope
from max.nn.kernels.rope import rotate_ragged as rotate_ragged
from max.nn.kernels.sampling import (
    apply_penalties_to_logits,
    topk_fused_sampling,
    update_frequency_data,
)

__all__ = [
    "apply_penalties_to_logits",
    "batched_dynamic_scaled_fp8_matmul",
    "batched_quantize_dynamic_scaled_float8",
    "convert_weights_to_fp8_fnuz_if_needed",
    "cross_attention_ragged",
    "dynamic_scaled_matmul",
    "flare_mla_decode_ragged",
    "flare_mla_decompress_k_cache",
    "flare_mla_prefill_plan",
    "flare_mla_prefill_ragged",
    "flash_attention_gpu",
    "flash_attention_ragged",
    "flash_attention_ragged_gpu",
    "fused_qk_ragged_rope",
    "fused_qkv_ragged_matmul",
    "fused_qkv_ragged_matmul_quantized",
    "fused_qkv_ragged_matmul_scaled_float8",
    "grouped_dynamic_scaled_fp8_matmul",
    "grouped_matmul_ragged",
    "k_cache_to_buffer",
    "kv_cache_get_max_seq_len",
    "kv_cache_ragged_radd",
    "matmul_k_cache_ragged",
    "matmul_k_cache_ragged_scaled_float8",
    "matmul_kv_cache_ragged",
    "matmul_static_scaled_float8",
    "merge_ragged_tensors",
    "moe_create_indices",
    "needs_fp8_fnuz_conversion",
    "normalize_e4m3fn_to_e4m3fnuz",
    "quantize_dynamic_scaled_float8",
    "quantize_static_scaled_float8",
    "rms_norm_key_cache",
    "scatter_set_constant",
    "sgmv_kernel",
    "sgmv_lora_kernel",
    "sgmv_qkv_lora_kernel",
    "store_kv_cache_ragged",
    "swish_glu",
    "topk_fused_sampling",
    "unfused_qkv_ragged_matmul_gguf_quantized",
    "update_frequency_data",
]

__getattr__ = lazy_names(__name__)
