"""Names of MAX that this release lacks, and what does their work here; `max._compat.absent` tells of them."""

from __future__ import annotations

__all__ = ["ABSENT", "OF_26"]

_ADAPTERS = (
    "Adapters are served with --enable-lora and --lora-paths (docs/adapters.md); "
    "LoRAConfig has the options, and LoRAManager is in max.pipelines.lib.lora."
)
_DRAFTS = "Options of drafts are those of PipelineConfig: draft_model, speculative_method, num_speculative_tokens."
_GPUS = "It is of GPUs and their streams; what runs on a device here runs in order."
_COLLECTIVES = (
    "It is for several GPUs; the collectives of max.nn.comm are there, and norms of their own."
)
_SHARDING = (
    "A tensor is on one device, of which max.experimental.sharding has meshes; modules of max.nn are split by "
    "max.graph.ShardingStrategy."
)
_MODULE_ADAPTERS = (
    "max.experimental.nn has the layers; LoRA wraps a Linear, max.nn.LinearLoRA has adapters too."
)
_ROUTERS = "max.nn.MoE takes a gate of your own (gate_cls), and quant_config of 8-bit floats."
_CACHES = "A model has one KVCacheParams; its inputs are those of flattened_kv_inputs (docs/compatibility.md)."
_TEMPLATES = "PipelineModelWithKVCache and GraphPipelineModelWithKVCache are the bases of models (docs/add-a-model.md)."
_PARSERS = "SupportedArchitecture(tool_parser=) takes the name of a format, or a function (docs/compatibility.md)."
_STORE = "Compiled programs are kept in the cache, which MAX_CACHE_DIR names (docs/runtime.md)."
_COMPILER = "It is of MAX's compiler; docs/compiler.md tells of this one."
_COMPLEX = "Complex numbers are pairs of floats: ops.as_interleaved_complex and complex_mul; irfft is there."
_FOREIGN = "InferenceSession.load takes TorchScript modules, with input_specs (docs/importers.md)."
_EAGER = "MAX_DEBUG_NANS=1 checks operations one by one (docs/eager.md)."
_ENCODINGS = (
    "Encodings and scales of a checkpoint are found when it is loaded (docs/quantization.md)."
)
_FP4 = "4-bit floats of GPUs are absent; QuantConfig is for 8-bit floats (docs/compatibility.md)."
_GRAMMARS = "`max serve` holds answers to a schema or a grammar (docs/serving.md)."
_KERNELS = "It is a kernel of GPUs or of 26.x caches; ops.custom runs kernels of your own (docs/custom-ops.md)."
_LINEAR = "max.nn.Linear is the layer, ops.matmul the product."
_LOGITS = "max.nn.Transformer returns logits as return_logits says; a model of your own gathers its rows by ops.gather."
_MEDIA = "Models here take and give text, tokens or vectors."
_PARTS = "It is a part of 26.x pipelines; what parts are here is in docs/compatibility.md."
_PENALTIES = "max.nn.kernels.apply_penalties_to_logits subtracts the penalties."
_REALIZED = "Operations are recorded until a value is needed (docs/eager.md)."
_RESPONSES = "It is of the Open Responses API; `max serve` has that of OpenAI (docs/serving.md)."

ABSENT: dict[str, str] = {
    "max.serve.*": "`max serve` is the server; its parts are no API.",
    "max.benchmark": "`max generate` and Model.profile() say how fast a model is.",
    "max.kernels": "Kernels are written in Python: max.kernel.register makes a custom op of one (docs/custom-ops.md).",
    "max.engine.Torch*": _FOREIGN,
    "max.support": "It is of MAX's own tools.",
    "max.driver.Completion*": _GPUS,
    "max.driver.LaunchTrace*": _GPUS,
    "max.driver.*launch_trace": _GPUS,
    "max.driver.SymmetricPool": _GPUS,
    "max.driver.enable_all_peer_access": _GPUS,
    "max.driver.*virtual*": "CPU(0), CPU(1), … are devices that stand for others (docs/runtime.md).",
    "max.engine.MefStore": _STORE,
    "max.graph.GraphBlock": _COMPILER,
    "max.graph.ops.allgather_rms_norm*": _COLLECTIVES,
    "max.graph.ops.reduce_scatter_rms_norm*": _COLLECTIVES,
    "max.graph.ops.*fft*": _COMPLEX,
    "max.experimental.functional.*fft*": _COMPLEX,
    "max.experimental.functional.distributed_scatter": _SHARDING,
    "max.experimental.functional.shard*": _SHARDING,
    "max.experimental.sharding.*": _SHARDING,
    "max.experimental.*realization_context": "Operations are recorded until a value is needed (docs/eager.md).",
    "max.experimental.nn.common_layers": _MODULE_ADAPTERS,
    "max.nn.quant_ops": "max.nn.Linear(quant_config=) and max.nn.kernels.dynamic_scaled_matmul multiply 8-bit floats.",
    "max.nn*.StackedMoE": _ROUTERS,
    "max.nn.moe.*Strategy": _ROUTERS,
    "max.nn*.Multi*KVCache*": _CACHES,
    "max.nn.kv_cache.Recurrent*": _CACHES,
    "max.nn.kv_cache.*LeafRegion": _CACHES,
    "max.pipelines.*ModuleV3PipelineModel*": _TEMPLATES,
    "max.pipelines.*graph_specs": _TEMPLATES,
    "max.pipelines.*ToolParser": _PARSERS,
    "max.pipelines.*ReasoningParser": _PARSERS,
    "max.pipelines.*tool_parsing": _PARSERS,
    "max.pipelines.*lib.reasoning": _PARSERS,
    "max.pipelines.lib.*lora*": _ADAPTERS,
    "max.pipelines.architectures.*": "There are granite, llama3, mistral, qwen2 and qwen3, and "
    "encoders; --custom-architectures adds your own (docs/add-a-model.md).",
    "max.pipelines.*TextAndVisionTokenizer": "Models of images are absent; TextTokenizer is for text.",
}  # fmt: skip
"""Patterns of dotted names, and what to do instead. A pattern stands for all that is in what it names, too."""

_OF_CACHES = (
    "AttnKey AttnKeyInterface BatchCharacteristics CacheLeafKind CacheLeafParamInterface HostStagingAlloc "
    "KVCacheAssignments KVCacheBuffer KVCacheBufferInterface KVCacheGroupId KVCacheMemory KVCacheQuantizationConfig "
    "KVConnectorConfigInterface KVConnectorType KVHashAlgo MHAAttnKey MLAAttnKey MLAKVCacheParams MSAAttnKey "
    "MSAKVCacheParams NullKVConnectorConfig PACKED_PAGE_STRIDE RecurrentStateBuffer RecurrentStateParams "
    "RecurrentStateRegion compute_max_seq_len_fitting_in_cache compute_num_device_blocks "
    "contiguous_page_view_and_stride estimated_memory_size packed_page_stride padded_lut_cols page_stride_of page_view "
    "recurrent_leaf recurrent_leaves "
    "spec_decode_cache_slack"
)
_OF_MODELS = {
    "AudioGenerationTokenizer DenoisingCacheConfig DenoisingCacheSettings PixelGenerationPipeline "
    "PixelGenerationTokenizer VisionPreprocessCache": "Models here take and give text, tokens or vectors.",
    "CompiledArtifacts GraphRole GraphSpec ModuleV3MultiGraphPipelineModelWithKVCache ModuleV3Outputs "
    "ModuleV3SingleReplicaBatchProcessor MultiGraphPipelineModelWithKVCache SupportsSSMStateWarmup compile_graphs "
    "init_graphs": _TEMPLATES,
    "SpeculativeConfig Speculator UnifiedEagleOutputs UnifiedSpecDecodeInputs": _DRAFTS,
}
OF_26: dict[str, dict[str, str]] = {
    "max.driver": {
        "HostHazardError": _GPUS,
    },
    "max.engine": {
        "ArtifactBodyMismatch CompileOnlyExecutionError CompileOnlyModel "
        "MissingArtifactError": _STORE
    },
    "max.experimental.functional": {"reduce_scatter": _SHARDING},
    "max.experimental.tensor": {
        "external_shard_names": _SHARDING,
        "RealizationContext RealizationState": _REALIZED,
    },
    "max.graph.ops": {"distributed_broadcast distributed_scatter": _COLLECTIVES},
    "max.nn.comm": {"MulticastPool": _COLLECTIVES},
    "max.nn.kv_cache": {_OF_CACHES: _CACHES},
    "max.nn.kv_cache.cache_params": {_OF_CACHES: _CACHES},
    "max.nn.moe": {
        "forward_moe_sharded_layers": _COLLECTIVES,
        "EplbExpertContainer GateUpFormat Nvfp4Scales apply_eplb_placement interleaved_block_scales_shape": _ROUTERS,
    },
    "max.nn.sampling": {
        "LogitPenalties": _PENALTIES,
        "compute_synthetic_acceptance_base_rate": _DRAFTS,
        "AcceptanceSampler greedy_acceptance_sampler stochastic_acceptance_sampler "
        "synthetic_acceptance_sampler": _DRAFTS,
    },
    "max.pipelines": {
        **_OF_MODELS,
        "ADAPTER_CONFIG_FILE": _ADAPTERS,
        "AutoModel AutoPipeline AutoTokenizer EagerUsageValidator EagerValidatorMode EmbeddingsPipelineType "
        "MemoryEstimator TextGenerationPipelineInterface eager_validator "
        "supported_encoding_supported_devices": _PARTS,
    },
    "max.pipelines.lib": {
        **_OF_MODELS,
        "EmbeddingsPipelineType MemoryEstimator ModelManifest OverlapTextGenerationPipeline "
        "PipelineModelType RetrievedPipeline build_eos_tracker_for_request "
        "float32_array_to_buffer float32_to_bfloat16_as_uint16 "
        "max_tokens_to_generate parse_quant_config resolve_eos_token_ids "
        "resolve_max_config_inheritance supported_encoding_supported_devices token_sampler "
        "validate_hf_repo_access": _PARTS,
        "KVConnectorConfig": _CACHES,
    },
    "max.pipelines.lib.interfaces": {
        **_OF_MODELS,
        "ArchConfigWithVisionCache ArchVLConfigWithTextSubconfig arch_has_vision_tower vision_merge_inputs": _MEDIA,
        "modulev3_ragged_kv_symbolic_input_tree ragged_batch_inputs ragged_kv_symbolic_input_tree "
        "signal_inputs": _TEMPLATES,
    },
    "max.experimental": {
        "validation": _EAGER,
    },
    "max.nn": {
        "forward_moe_sharded_layers": _COLLECTIVES,
    },
    "max.nn.kernels": {
        "block_scaled_preshuffle_b_5d block_scaled_preshuffle_grouped_scale_4d block_scales_interleave "
        "compress_windows_ragged dynamic_block_scaled_matmul dynamic_block_scaled_matmul_amd "
        "dynamic_block_scaled_matmul_mxfp6 eagle_prefill_shift_tokens flare_mla_decode_ragged_scaled "
        "fused_dual_qk_rms_norm_rope_nvfp4_ragged fused_dual_qk_rms_norm_rope_ragged "
        "grouped_dynamic_block_scaled_matmul_amd grouped_dynamic_block_scaled_matmul_amd_swiglu_quant "
        "grouped_dynamic_scaled_mxfp6_matmul grouped_matmul_block_scaled grouped_matmul_blocked_swiglu "
        "grouped_quantize_dynamic_block_scaled grouped_quantize_nvfp4_row_scaled gumbel_argmax_from_probs "
        "indexer_score_ragged keyed_uniform kv_cache_gather_rows_ragged kv_cache_ragged_2m_iadd "
        "latent_sparse_attention_ragged launch_host_func learnable_2d_interp_pos_emb "
        "masked_flash_attention_gpu mla_decode_graph mla_fp8_index_top_k mla_fp8_index_top_k_physical "
        "mla_fp8_index_top_k_with_physical mla_kpool_compress mla_kpool_expand_topk mla_kpool_ring_close "
        "mla_kpool_seed_tail mla_prefill_decode_graph mla_prefill_graph moe_eplb_remap "
        "moe_router_single_group_eplb moe_sink_gate_router msa_sparse_attention_ragged "
        "msa_sparse_attention_ragged_mxfp6 msa_sparse_attention_ragged_mxfp8 msa_sparse_indexer mxfp4_dequant "
        "mxfp6_dequant preshuffle_block_scaled_b preshuffle_block_scaled_b_scales "
        "quantize_dynamic_block_scaled quantize_dynamic_block_scaled_mxfp4 "
        "quantize_dynamic_block_scaled_mxfp6 quantize_tensor_dynamic_scaled_float8 "
        "rms_norm_quantize_dynamic_scaled_float8 sgmv_lora_qkv_shrink sgmv_qkv_lora_fused sleep "
        "smallm_streaming_matmul spatial_merge store_k_scale_cache_ragged topk_fused_sampling_with_dist "
        "tpool_patch_merger wait_host_value wait_host_value_with_dep": _KERNELS,
    },
    "max.nn.linear": {
        "linear": _LINEAR,
    },
    "max.nn.quant_config": {
        "fp4_packed_k": _FP4,
    },
    "max.nn.transformer": {
        "DistributedLogitsPostprocessMixin LogitsPostprocessMixin distributed_logits_postprocess "
        "forward_sequential_layers logits_postprocess": _LOGITS,
    },
    "max.pipelines.context": {
        "AudioContext MediaBudgetExceeded MediaDecodeError PixelContext PixelGenerationContextType SampledVideo "
        "VLMContextType VideoSource VideoStreamInfo decode_video_frames open_video_container plan_frame_indices "
        "probe_video validate_flux2_max_pixel_area validate_video validate_wan_max_pixel_area": _MEDIA,
        "EOSTracker FUTURE_TOKEN GenerationOutput PromptTooLongError Range TokenHashOverride TokenSlice": _PARTS,
        "GrammarEnforcementSnapshot GrammarEnforcementState GrammarMatcher "
        "StructuredOutputRegionDelimiters": _GRAMMARS,
        "SpecDecodingState": _DRAFTS,
    },
    "max.pipelines.kv_cache": {
        "BlockCount ByteCount DummyKVCache JengaKVCacheManager KVConnectorConfig "
        "KVTransferEngine KVTransferEngineMetadata ModelConfig ModelConfigWithKVCache PagedKVCacheManagerInterface "
        "PagedMemoryPlanner TransferReqData available_port cache_dtype_for_encoding is_fp4_kv_cache_format "
        "kv_cache_memory_size max_seq_len_fitting_in_cache": _CACHES,
    },
    "max.pipelines.lib.config": {
        "DEFAULT_MAX_BATCH_INPUT_TOKENS DenoisingCacheConfig DenoisingCacheSettings "
        "supported_encoding_supported_devices": _PARTS,
        "KVConnectorConfig KVConnectorType": _CACHES,
        "SpeculativeConfig SpeculativeMethod": _DRAFTS,
    },
    "max.pipelines.modeling.types": {
        "ChatEncoderOutcomesProbe CompletedBatchStats DUMMY_REQUEST_ID LabelScoringTokenizer MessageContent "
        "PreprocessCacheStatsProbe TextContentPart TokenIds msgpack_numpy_oob_decoder "
        "msgpack_numpy_oob_encoder": _PARTS,
        "ImageContentPart PixelGenerationInputs PreprocessedImageProbe VideoContentPart "
        "VisionPreprocessCacheStats": _MEDIA,
        "OpenResponsesRequest": _RESPONSES,
        "ParsedReasoningDelta ParsedToolCall ParsedToolCallDelta ParsedToolResponse ReasoningPipelineTokenizer "
        "ReasoningSpan": _PARSERS,
    },
    "max.pipelines.request": {
        "AllowedToolChoice AssistantMessage AudioGenerationDetails DUMMY_REQUEST_ID DeveloperMessage Error "
        "FastAPIRequestProtocol FunctionCall FunctionCallOutput FunctionCallStatus FunctionTool FunctionToolChoice "
        "FunctionToolParam ImageDetail ImageGenerationDetails IncludeEnum IncompleteDetails InputContent "
        "InputFileContent InputImageContent InputMessage InputTextContent InputTokensDetails InputVideoContent "
        "ItemReferenceParam JsonObjectField JsonObjectParam JsonSchemaField JsonSchemaParam LogProb "
        "MediaDataUriFetcher Message MessageRole MessageStatus OpenResponsesRequest OpenResponsesRequestBody "
        "OutputAudioContent OutputContent OutputImageContent OutputTextContent OutputTokensDetails "
        "OutputVideoContent ReasoningBody ReasoningEffortEnum ReasoningParam ReasoningReference "
        "ReasoningReferenceParam ReasoningSummaryContent ReasoningSummaryEnum RefusalContent ResponseFormat "
        "ResponseFormatParam ResponseResource ServiceTierEnum StreamOptionsParam SystemMessage TextField TextParam "
        "ToolChoice ToolChoiceValueEnum TopLogProb TruncationEnum UrlCitationBody UrlCitationParam Usage "
        "UserMessage VerbosityEnum": _RESPONSES,
    },
    "max.pipelines.weights": {
        "AUTO_CAST_ENV_VAR ModelOptModuleQuant apply_fused_kernel_flags auto_cast_weights_from_env "
        "build_modelopt_nvfp4_config gptq_quant_config is_diffusion_pipeline parse_quant_config "
        "read_modelopt_quantized_layers resolve_hf_quant_config": _ENCODINGS,
    },
}
"""For each module names of other versions, separated by spaces, and what to do instead."""
