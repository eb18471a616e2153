"""Names that documented modules have in other versions of the API, and where they are here."""

from __future__ import annotations

from max._compat.module_paths import CONFIG, ENCODINGS, LIB, V26

__all__ = ["NAMES"]

_SCALES = {
    name: f"max.nn.float8_config.Float8{name}"
    for name in ("InputScaleSpec", "ScaleGranularity", "ScaleOrigin", "WeightScaleSpec")
}

_PARAMS = {
    name: "max.nn.kv_cache.cache_params.KVCacheParams"
    for name in ("KVCacheParamInterface", "MHAKVCacheParams")
} | {"KVCacheInputsPerDevice": "max.nn.kv_cache.cache_values.PagedCacheValues"}

_LIB_NAMES = {
    **{
        name: V26 + "arch_configs"
        for name in (
            "ArchConfig", "ArchConfigWithAttentionKVCache", "ArchConfigWithBoundedMaxSeqLen", "ArchConfigWithKVCache",
            "ArchConfigWithPermissiveMaxSeqLen", "ArchConfigWithStoredKVParams",
        )
    },
    **{
        name: V26 + "batch_processors"
        for name in (
            "BatchProcessor", "BatchProcessorRuntime", "PaddedEncoderBatchProcessor", "RaggedBatchProcessor",
            "SingleReplicaEmbeddingBatchProcessor", "SingleReplicaRaggedBatchProcessor",
            "build_single_replica_ragged_token_arrays", "process_ragged_kv_outputs", "ragged_kv_symbolic_inputs",
            "single_replica_context_batch",
        )
    },
    **{
        name: V26 + "models"
        for name in (
            "CompilationTimer", "GraphPipelineModel", "GraphPipelineModelWithKVCache", "PipelineModelWithKVCache",
        )
    },
    **{
        name: "max._compat.config"
        for name in (
            "MAXConfig", "convert_max_config_value", "deep_merge_max_configs",
            "get_default_max_config_file_section_name",
        )
    },
    "MemoryPlan": V26 + "memory",
    "PipelineArgs": V26 + "config",
    "PipelineRuntimeConfig": V26 + "config",
    "WeightPathParser": "max._compat.pipelines.weight_path_parser",
    **{
        name: ENCODINGS
        for name in (
            "is_float4_encoding", "parse_supported_encoding_from_file_name", "supported_encoding_dtype",
            "supported_encoding_quantization", "supported_encoding_supported_on",
        )
    },
}  # fmt: skip

_KERNELS = {
    name: f"max.nn.kernels.{family}"
    for family, names in {
        "attention": "flash_attention_padded_kv_cache",
        "cache": "kv_cache_store_paged_padded kv_cache_store_paged_ragged store_k_cache_padded store_k_cache_ragged "
        "store_v_cache_ragged",
        "experts": "moe_finalize moe_router_group_limited",
        "indexing": "inplace_memcpy scatter_nd_skip_oob_indices sliced_add ceildiv",
        "norms": "apply_qk_rms_norm mtp_eh_norm row_mean_of_squares row_mean_of_squares_qk rms_norm_value_cache "
        "fused_qk_ragged_rms_norm",
        "projections": "fused_qkv_padded_matmul",
        "streams": "hyper_connection_gates",
        "rope": "rope_ragged rope_ragged_with_position_ids fused_qk_rms_norm_rope_ragged rope_split_store_ragged",
    }.items()
    for name in names.split()
} | {
    name: "max._compat.nn.logits"
    for name in (
        "apply_packed_bitmask", "apply_packed_bitmask_with_penalties", "argmax_with_bias", "top_k_per_row",
        "topk_topp_masked_probs",
    )
}  # fmt: skip

NAMES: dict[str, dict[str, str]] = {
    "max.driver": {
        "CUDA": "max.driver.Accelerator",
        "DeviceQueue": "max.driver.DeviceStream",
        "load_max_buffer": "max.driver._checkpoint_file",
        "load_max_tensor": "max.driver._checkpoint_file",
        "batch_inplace_copy": "max._compat.driver.v26_copies",
        "copy_pinned_to_destinations": "max._compat.driver.v26_copies",
    },
    "max.engine": {
        "CompilationStopped": "max.engine.debug_config",
        "CompiledModel": "max.engine._compiled",
        "DebugConfig": "max.engine.debug_config",
        "PrintStyle": "max.engine.debug_config",
        "DType": "max.dtype",
        "read": "max.engine._compiled",
    },
    "max.experimental.functional": {
        name: "max._compat.experimental.v26_functional"
        for name in ("call_on_mesh", "distributed_broadcast")
    },
    "max.graph": {
        "DType": "max.dtype",
        "DevicePlacementPolicy": "max.graph.graph_options",
        "GraphDebugConfig": "max.graph.graph_options",
        "ProfileScopeColor": "max.graph.graph_options",
        "default_custom_extensions": "max.graph.kernel_library",
        "default_custom_extensions_scope": "max.graph.kernel_library",
    },
    "max.interfaces": {
        "EmbeddingsGenerationContextType": "max.interfaces.EmbeddingsContext",
        "InputContext": "max.interfaces.TextGenerationContext",
        "InputModality": "max.interfaces.task",
    },
    "max.nn": {
        **_SCALES,
        "HyperConnection": "max.nn.layers.hyper_connection",
        "KVCacheMetrics": "max._compat.nn.kv_cache",
        "build_max_lengths_tensors": "max._compat.nn.kv_cache",
        "Conv1d": "max.nn.Conv1D",
        "Conv2D": "max.nn.Conv2d",
        "Conv2DV1": "max.nn.Conv2dV1",
        "Conv3d": "max.nn.Conv3D",
        "EmbeddingV2": "max.nn.Embedding",
        "KVCacheInputs": "max.nn.kv_cache.KVCacheInputs",
        "KVCacheParams": "max.nn.kv_cache.KVCacheParams",
        "LayerNormV2": "max.nn.LayerNorm",
        "LayerV2": "max.nn.Module",
        "LinearV2": "max.nn.Linear",
        "MLPV2": "max.nn.MLP",
        "MoEQuantized": "max.nn.MoEFp8",
        "RMSNormV2": "max.nn.RMSNorm",
        "TensorParallelLatentAttentionWithRope": "max.nn.attention.multi_latent_attention",
        "split_batch": "max._compat.nn.device_splits",
        "split_batch_replicated": "max._compat.nn.device_splits",
    },
    "max.nn.attention": {
        "num_heads_for_device": "max._compat.nn.device_splits",
        "TensorParallelLatentAttentionWithRope": "max.nn.attention.multi_latent_attention",
    },
    "max.nn.kv_cache": {
        **{
            name: "max.pipelines.kv_cache.manager"
            for name in ("PagedKVCacheManager", "load_kv_manager")
        },
        "estimate_kv_cache_size": V26 + "memory",
        **_PARAMS,
        "KVCacheMetrics": "max._compat.nn.kv_cache",
        "build_max_lengths_tensors": "max._compat.nn.kv_cache",
    },
    "max.nn.kv_cache.cache_params": {**_PARAMS},
    "max.nn.quant_config": {**_SCALES, "ceildiv": "max.nn.kernels.indexing"},
    "max.nn.layer": {
        "LayerV2": "max.nn.layer.Module",
        "MissingLayer": "max.nn.identity.MissingLayer",
    },
    "max.nn.linear": {
        "FusedMLP": "max._compat.nn.stacked_linear",
        "StackedLinear": "max._compat.nn.stacked_linear",
        "LinearV2": "max.nn.linear.Linear",
        "MLPV2": "max.nn.linear.MLP",
    },
    "max.nn.kernels": _KERNELS,
    "max.nn.moe": {"GatedActivation": "max.nn.activation", "MoEQuantized": "max.nn.moe.MoEFp8"},
    "max.pipelines": {
        "EmbeddingsPipeline": LIB + "embeddings_pipeline",
        "PrometheusMetricsMode": CONFIG + "audio_config",
        "PipelineTask": "max.interfaces",
        "RepoType": "max.pipelines.checkpoints.hub",
        **_LIB_NAMES,
    },
    "max.pipelines.core": {"PipelineTask": "max.interfaces", "TokenBuffer": V26 + "contexts"},
    "max.pipelines.kv_cache": {
        "InsufficientBlocksError": "max.pipelines.kv_cache.page_manager.OutOfPagesError",
        "KVCacheConfig": CONFIG + "kv_cache_config",
        "KVCacheParams": "max.nn.kv_cache",
        "KVCacheStrategy": "max.nn.kv_cache",
        "MemoryPlanner": V26 + "memory",
        "PagedKVCacheManager": "max.pipelines.kv_cache.manager",
        "estimate_kv_cache_size": V26 + "memory",
        "load_kv_manager": "max.pipelines.kv_cache.manager",
    },
    "max.pipelines.lib": _LIB_NAMES,
    "max.pipelines.lib.config": {
        **{
            name: where
            for name, where in _LIB_NAMES.items()
            if name == "PipelineArgs" or where == ENCODINGS
        },
        "PipelineRole": CONFIG + "enums",
        "RepoType": "max.pipelines.checkpoints.hub",
        "RopeType": CONFIG + "enums",
        "SupportedEncoding": ENCODINGS,
    },
    "max.pipelines.lib.interfaces": {
        name: where
        for name, where in _LIB_NAMES.items()
        if where.startswith(V26) and where != V26 + "config"
    },
}
"""For each module, names of other versions; the value is a module, or a module and another name in it."""
