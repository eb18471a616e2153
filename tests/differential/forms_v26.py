"""What programs of 26.x get, in words: rows of tables in `docs/compatibility.md` that no table of the code has.

`tests.differential.page` writes them. Add a row with the form that it describes.
"""

from __future__ import annotations

TAKEN: tuple[tuple[str, ...], ...] = (
    (
        "modules of ops",
        "`max.graph.ops.complex` with `mul`, `max.graph.ops.argsort` and other modules of single ops; "
        "`max.graph.buffer_utils` (`tensor_utils` in other versions): `cast_tensor_to`, "
        "`cast_tensors_to`, `cast_dlpack_to`",
    ),
    (
        "`max.graph.ops`, `max.experimental.functional`",
        "`ceil`, `prod`, `bottom_k`, `group_norm`; `scatter_add`, `scatter_max`, `scatter_min`, "
        "`scatter_mul` and their `scatter_nd_` forms; `resize_linear`, `resize_nearest`, "
        "`resize_bicubic`; `roi_align`, `non_maximum_suppression`; `buffer_create(init_value=)`, "
        '`constant_external(align=)`; `pad(mode="reflect")` and `"edge"`',
    ),
    (
        "`max.experimental.functional`",
        "`cond`, `while_loop`, `rebind`, `print`, `shape_to_tensor`, `complex_mul`; `arange`, `full`, "
        "`zeros`, `ones`, `uniform`, `normal`, `gaussian` and their `_like` forms, which take a type or a "
        "tensor; `clip`, `clamp`, `elementwise_max`, `elementwise_min`; `lazy`, `ensure_context`, "
        "`in_graph_context`; dtype and device of `range` and `hann_window` may be left out; `split` by "
        "one size; `stack(device=)`; `where(cond=)`, `split(split_size_or_sections=)`, "
        "`transfer_to(target=)`; ops of `max.graph` on tensors within `ensure_context`; `max` and `min` "
        "of all elements (`axis=None`); `custom(custom_extensions=)`, and `inplace_custom`, which writes "
        "eager tensors (26.7 refuses them); `functional(rule=)`: parameters annotated as `TensorValue` or "
        "`BufferValue` get that value of a tensor; a function of the user runs at each call, gets tensors "
        "as they are, and returns any structure",
    ),
    (
        "`max.experimental.tensor`",
        "`defaults_like`, `Tensor.from_dim`; reductions of all elements (`x.sum(axis=None)`, of `max` and "
        "`min` as methods), `Tensor(data, dtype=, device=)`, `x[0] = 1`, `clip`, `prod`, `split(2)`, "
        "`to(target=)`, `arange` of fractions, with `out_dim` and up to a symbol, `__buffervalue__`, "
        "lists of slices as indices, `full_like`, `zeros_like`, `ones_like` and `range_like` of a tensor "
        "(`input=`)",
    ),
    (
        "`max.experimental.nn`",
        "`Module[[Tensor], Tensor]`, `Module.device`, `forward` of modules for `__call__`, `ModuleList`, "
        "`RMSNorm`, `GemmaRMSNorm`, `GroupNorm`, `Conv2d`, `RotaryEmbedding`, "
        "`TransposedRotaryEmbedding`, `TransparentModule`, `as_subgraph` (equal parts share their kernels "
        "with it and without), `PinnedDeviceTensor` (an annotation; on CPUs that of any tensor), `LoRA`, "
        "`lora_layers`, `lora_parameters` (of `Linear`; 26.7 wraps fused projections too), `Sequential` "
        "as a list, `to(target=)`, `compile(weights=, session=, name=, custom_extensions=, auto_cast=)`, "
        "`trace`, which returns a `Graph`, `load_state_dict(auto_cast=)`",
    ),
    (
        "`max.experimental.random`",
        "`seed`, `set_seed(value=)`, `_like` functions of a tensor",
    ),
    (
        "`max.graph`",
        "`Dim.substitute`, `TensorType.parameters`, `BufferType.parameters`, `BufferType.cast`",
    ),
    (
        "`max.dtype`",
        "`finfo`; `DType.float6_e2m3fn`, `float6_e3m2fn` and `float8_e8m0fnu`. Their elements are those "
        "of ml_dtypes; kernels and graphs convert and compute in 6-bit floats as in other narrow ones, "
        "and refuse `float8_e8m0fnu`, which tensors and safetensors files hold",
    ),
    (
        "`max.nn`",
        "`split_batch` and `split_batch_replicated` (splits that leave out a sequence are an error; 26.7 "
        "returns wrong parts), `activation_function_from_name`, `MoEQuantized` (the later name of "
        "`MoEFp8`), `build_subgraph(inputs=)` of values, `compile`, `trace`, `named_modules` and "
        "`replace_module` of modules, `Identity`, `MissingLayer`, `QuantConfig` of 8-bit floats "
        "(`quant_config=` of layers), `StackedLinear` (its names leave out the attribute), `FusedMLP`",
    ),
    (
        "`max.driver`",
        "`Device.default_queue`, `is_host_unified`, `max_single_alloc_size`, `model_name`; `DeviceQueue` "
        "(our `DeviceStream`) and `DeviceEvent`, which are ready at once on a CPU; `Usage`, "
        "`Buffer(usage=)` and `Buffer.usage`; `batch_inplace_copy`, `copy_pinned_to_destinations`, "
        "`load_device`",
    ),
    (
        "configurations, arrays",
        "`max.config` with `MAXConfig`, `max.nn.parallel`, "
        "`max.pipelines.kv_cache.InsufficientBlocksError`",
    ),
    (
        "debugging",
        "`InferenceSession.debug`, `DebugConfig`, `MODULAR_DEBUG`: `nan_check` (models run on the NumPy "
        "interpreter, which raises at the first op whose result has a NaN; 26.7 checks the results of its "
        "fused kernels), `ir_output_dir` (the module of each loaded graph), `op_log_level`, "
        "`print_style`, `sensible_mode`, `stack_trace_on_crash`, `stack_trace_on_error`; `assert_level`, "
        "`device_sync_mode` and `source_tracebacks` change nothing, as kernels always check, CPUs are "
        "synchronous and lines are always kept; `pre_jit` and `uninitialized_read_check` are errors. "
        "`PrintStyle`, `BINARY_MAX_CHECKPOINT`, `max.driver.load_max_buffer`",
    ),
    (
        "`max.engine`",
        "`InferenceSession.compile`, `compile_async`, `init`, `load_all`, `init_all`; `CompiledModel`, "
        "whose `export_mef` writes the graph (machine code stays in the cache), and `read`; "
        "`load(tile_based_fusion=)` and `use_fi_topk_kernel`, without effect",
    ),
    (
        "`max.graph`",
        "`Module`, `Graph(module=)`, `Graph.module`, `Graph.copy`; `ShardingStrategy.segmented`, "
        "`sharded_axis`, `is_axiswise` and others, strategies as functions of a weight; "
        "`Graph.profile_scope` with `ProfileScopeColor` (`Model.profile()` names kernels as `kernel "
        "[scope]`), `Graph.debug`, `Graph(strict_device_placement=, is_device_graph=)` with "
        "`DevicePlacementPolicy`, without effect; a `KernelLibrary` as a container of names; "
        "`default_custom_extensions` and its scope; `WeightData.to_buffer`",
    ),
    (
        "`max.experimental`",
        "`Tensor.buffers`, `graph_values`, `local_shards`, `num_shards`, `is_distributed`, `materialize`: "
        "those of one device; `__rich_repr__`; `LayerNorm(keep_dtype=, elementwise_affine=, use_bias=)`, "
        "`compile(allow_subgraphs=)`, `functional(graph_op=)`",
    ),
    (
        "`max.experimental.custom`",
        "`declare`, `CustomOp`, `TemplateType`, `Symbol`, `Symbols`, `Param`, `DTypeVar`; sizes of "
        "results follow from operands (26.7 has shape functions too)",
    ),
    (
        "`max.tree`",
        "all of it: `flatten`, `unflatten`, `map`, `update`, `paths`, `nodes`, `dataclass`; modules of "
        "`max.experimental.nn` and the inputs of caches are nodes",
    ),
    (
        "one function for several devices",
        "`ops.parallel`, `ops.side_stream`, `functional.side_stream`: their ops are staged in order, once "
        "for each launch (26.7 takes a few ops in `parallel` only); `ops.shard_and_stack`, "
        "`ops.allgather(group_size=)`",
    ),
    (
        "meshes of one device",
        "`max.experimental.sharding`: `DeviceMesh`, `DeviceMapping`, `NamedMapping`, the placements, "
        "`TensorLayout`, `BufferLayout`, `auto_reshard`; where a device is given (`device=` of tensors, "
        "`to`, `default_device`, `compile`) a mesh or mapping of one device is that device, and "
        "`Tensor.mesh`, `placements` and `mapping` say so, as in 26.7. `F.distributed_broadcast`, "
        "`F.call_on_mesh`, `F.allgather` and `F.allreduce_sum` of a tensor. Several devices are a "
        "`ShardingError`",
    ),
    (
        "`max.nn.kernels`",
        "statistics: `row_mean_of_squares`, `row_mean_of_squares_qk`, `apply_qk_rms_norm`, `mtp_eh_norm`; "
        "logits: `apply_packed_bitmask`, `apply_packed_bitmask_with_penalties`, `argmax_with_bias`, "
        "`top_k_per_row`, `topk_topp_masked_probs`; experts: `moe_finalize`, `moe_router_group_limited`; "
        "rotation: `rope_ragged`, `rope_ragged_with_position_ids` (one position a token); caches: "
        "`store_k_cache_ragged`, `store_v_cache_ragged`, `store_k_cache_padded`, "
        "`kv_cache_store_paged_ragged`, `kv_cache_store_paged_padded`, `rms_norm_value_cache`, "
        "`fused_qk_ragged_rms_norm`, `fused_qk_rms_norm_rope_ragged`, `rope_split_store_ragged`, "
        "`fused_qkv_padded_matmul`, `flash_attention_padded_kv_cache`; rows: `sliced_add`, "
        "`scatter_nd_skip_oob_indices`, `inplace_memcpy`; `ceildiv`. Many are for GPUs only in 26.7, so "
        "elements are compared with NumPy and torch",
    ),
    (
        "hyper-connections",
        "`HyperConnection` of `max.nn` and `max.experimental.nn`, `hyper_connection_gates`: 26.7 runs "
        "them on GPUs only, so results are compared with those of transformers (DeepSeek-V4)",
    ),
    (
        "gated activations",
        "`GatedActivation` (also `MoE(activation=)`), `make_concatenated_…`, `make_interleaved_…` and "
        "`make_stacked_gated_activation_fn`, `MLP(swiglu_limit=)`, `FusedMLP(swiglu_limit=)`, "
        "`SigmoidTopKRouter`",
    ),
    (
        "counts and lengths",
        "`KVCacheMetrics` (without counts of remote caches), `build_max_lengths_tensors`, "
        "`num_heads_for_device`",
    ),
    (
        "modules",
        "`max.experimental.nn`, `max.experimental.torch`, `max.tensor`, `max.functional`, `max.random`, "
        "and the others of `src/max/_compat/module_paths.py`",
    ),
)
"""Modules, and what of 26.7 that 25.7 has not is taken."""

NOT_TAKEN: tuple[tuple[str, ...], ...] = (
    (
        "`rms_norm` with `multiply_before_cast=False` by default",
        "the reference says True",
    ),
    (
        "tensors on meshes of several devices; `AxisAssignment` and rules of ops, `visualize`, "
        "`reduce_scatter` and `call_on_mesh(mesh_axes=)` on tensors",
        "distributed tensors are a system of their own: results get placements by rules of each op; "
        "`max.nn` modules shard by `ShardingStrategy`",
    ),
    (
        "`allgather_rms_norm…`, `reduce_scatter_rms_norm`",
        "collectives with fused norms for several GPUs",
    ),
    (
        "virtual devices of `max.driver`",
        "MAX compiles for GPUs that the machine lacks; here graphs run on `CPU(1)`, `CPU(2)`, …",
    ),
    (
        "`CompletionFlag`, launch traces, `SymmetricPool`, `enable_all_peer_access` of `max.driver`, "
        "times of events",
        "GPUs",
    ),
    (
        "`MefStore`, `precompiled_mefs`, `export_mefs` of `max.engine`",
        "compiled files of MAX, which a program names and ships; here compiled programs are found in the "
        "cache by their content, so that a file of another graph cannot be given (docs/runtime.md)",
    ),
    (
        "other new layers of `max.nn`; `LoRA` of fused projections (`common_layers`)",
        "not there yet",
    ),
    (
        "63 functions of `max.nn.kernels`",
        "formats of GPUs (block-scaled products, preshuffled weights), caches of 26.7 (index pages, "
        "latent pools, slots), GPU streams (`sleep`, `launch_host_func`, `wait_host_value`); of "
        "`keyed_uniform`, `gumbel_argmax_from_probs` and `topk_fused_sampling_with_dist` the numbers are "
        "those of its generator; `moe_sink_gate_router` runs on GPUs only, and its formula is not stated "
        "fully",
    ),
    (
        "`QuantConfig` of 4- and 6-bit floats, MXFP8 and int8, `max.nn.quant_ops`, `StackedMoE` and "
        "strategies of `max.nn.moe`",
        "their scales are tensors of `float8_e8m0fnu` in layouts of GPUs, which graphs refuse; "
        "checkpoints of MXFP4 load, layers take `quant_config=` of 8-bit floats",
    ),
    (
        "`MultiKVCacheParams`, `RecurrentStateParams` of `max.nn.kv_cache`",
        "of 26.7's caches, whose inputs are others; `max serve` has counts of its cache in `/metrics`",
    ),
    (
        "complex dtypes, `fft`",
        "MAX has none; complex numbers are pairs of floats (`as_interleaved_complex`, `complex_mul`), "
        "`irfft` is there",
    ),
    (
        "`shard` of `StackedLinear` and `FusedMLP`, `compile(is_device_graph=)`, `trace(module=)`",
        "one device",
    ),
    (
        "`RealizationContext`, `realization_context`, `RealizationState`, `Tensor.state`",
        "a context decides when 26.7 computes, and holds the graph of what is not computed; here "
        "operations are always recorded, and no graph exists before a value is needed",
    ),
    (
        "`GraphBlock`",
        "a block of MAX's MLIR bindings, for regions of its own ops",
    ),
)
"""What is not taken, and the reason."""

ARCHITECTURES: tuple[tuple[str, ...], ...] = (
    (
        "modules",
        "`max.pipelines.modeling.types`, `max.pipelines.context`, "
        "`max.pipelines.lib.interfaces.arch_config` and `.batch_processor`, `max.pipelines.lib.utils`, "
        "`max.pipelines.kv_cache`, `max.pipelines.weights`, `max.tree`: `src/max/_compat/module_paths.py`",
    ),
    (
        "`SupportedArchitecture`",
        "`config` becomes the model's `model_config_cls` where it sets none. `tool_parser` (a name, or a "
        "function of the repository) sets the format of tool calls of `max serve`; `memory_planner` the "
        "default batch size; `requires_max_batch_context_length` bounds the tokens of a batch; "
        "`pipeline_cls` replaces the pipeline. Refused: `input_modalities` beyond text, "
        "`denoising_cache_defaults`, `cascade_pipeline_factory`. Without effect: `batching`, "
        "`reasoning_parser`, `default_structured_output_…`, `supports_…`, `checkpoint_draft_width`, "
        "`checkpoints_recurrent_state`",
    ),
    (
        "constructors of models",
        "`(pipeline_config, session, devices, kv_cache_config, weights, adapter, return_logits)` with "
        "`memory_plan`, `return_hidden_states` (none) and `max_batch_size`; `self.huggingface_config`, "
        "`self.dtype`, `self.max_seq_len`, `self.kv_params`, `self.arch_config`. Those of `Llama3Model` "
        "and `GraphModel` too",
    ),
    (
        "bases of models",
        "`PipelineModelWithKVCache`, `GraphPipelineModel` and `GraphPipelineModelWithKVCache` "
        "(`_build_graph_for_compile`, `_create_model_config`); only `execute` is abstract",
    ),
    (
        "batches",
        "`prepare_initial_token_inputs(replica_batches, …)` gets one list; tokens of a request are a "
        "`TokenBuffer` (`tokens.active`, `tokens.all`, …). `batch_processor_cls` with "
        "`SingleReplicaRaggedBatchProcessor`, `SingleReplicaEmbeddingBatchProcessor`, "
        "`PaddedEncoderBatchProcessor`. `ModelInputs` is a dataclass, `buffers` the inputs of the graph. "
        "Without `prepare_next_token_inputs` each step has inputs of its own",
    ),
    (
        "configs",
        "`ArchConfig`, `ArchConfigWithKVCache`, `…WithAttentionKVCache`, `…WithStoredKVParams`, "
        "`…WithBoundedMaxSeqLen`, `…WithPermissiveMaxSeqLen`; methods get the parameters that they name",
    ),
    (
        "cache",
        "`KVCacheConfig.to_params`, `KVCacheParams(num_layers=, devices=)`, `flattened_kv_inputs`, "
        "`unflatten_kv_inputs`, `get_symbolic_inputs`. A cache has four inputs, of other names and number "
        "than in 26.7: use these methods",
    ),
    (
        "`PipelineConfig`",
        "`model`, `models`, `runtime`, `sampling`, `profiling`; `from_args(PipelineArgs(…))`, "
        "`PipelineRuntimeConfig`; `model.max_length`, `model.kv_cache`",
    ),
)
"""Parts of custom architectures, what 26.x has, and what it does here."""

PROGRAMS: tuple[tuple[str, ...], ...] = (
    (
        "graphs with `max.graph`, `max.engine`, `max.driver`: search, data frames, images, detectors, "
        "speech, recurrences, training, compilers of other languages' graphs",
        "18",
        "18",
        "of one its export of compiled files by a session (`export_mefs`); `CompiledModel.export_mef` is "
        "there",
    ),
    (
        "networks of `max.nn` modules",
        "4",
        "2",
        "two call names that no version of MAX has",
    ),
    (
        "operations of PyTorch (`max.torch`)",
        "6",
        "5",
        "one places its constants on a GPU; of one the kernel was rewritten in the kernel language",
    ),
    (
        "custom ops whose kernels are Mojo",
        "10",
        "0",
        "the kernels: they are to be written in the [kernel language](custom-ops.md), the Python around "
        "them stays",
    ),
    (
        "custom architectures, `LLM`",
        "9",
        "6",
        "two were written for 26.x before its interfaces were there and are not tried again, one is an "
        "architecture of MAX's own (`gpt_oss`)",
    ),
    (
        "eager tensors (`max.experimental`, `max.tensor`)",
        "5",
        "2",
        "three are not tried again since they are there",
    ),
    (
        "ONNX and TorchScript files given to `load` (2024)",
        "6",
        "0",
        "those formats, which MAX gave up too",
    ),
    (
        "all",
        "58",
        "33",
        "",
    ),
)
"""Kinds of published programs, how many were tried and run, and what stops the others."""
