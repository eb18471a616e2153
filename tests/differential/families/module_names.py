"""The modules that define the public names of graphs, tensors and sessions: an import of each name from each."""

from __future__ import annotations

from tests.differential.families._plain import plain_family

#: A module, and names in it; a line that begins with blanks goes on.
HOMES = """
max.driver: launch_trace
max.driver.buffer: batch_inplace_copy copy_pinned_to_destinations load_max_buffer
max.driver.driver: DeviceSpec accelerator_api accelerator_architecture_name calculate_virtual_device_count
    calculate_virtual_device_count_from_cli devices_exist load_devices scan_available_devices
max.dtype.dtype
max.dtype.dtype_extension: finfo
max.engine
max.engine.api: CompilationStopped CompileOnlyExecutionError CompileOnlyModel CompiledModel GPUProfilingMode
    InferenceSession LogLevel read
max.engine.mlrt
max.graph
max.graph.dim: AlgebraicDim Dim StaticDim SymbolicDim
max.graph.dtype_promotion
max.graph.graph: DevicePlacementPolicy Graph GraphBlock GraphDebugConfig KernelLibrary Module ProfileScopeColor
    default_custom_extensions default_custom_extensions_scope
max.graph.ops: max min
max.graph.ops.allgather: allgather
max.graph.ops.allgather_rms_norm: allgather_rms_norm allgather_rms_norm_quant_mxfp6 allgather_rms_norm_quant_mxfp8
max.graph.ops.allreduce: matmul_allreduce sum
max.graph.ops.argsort: argsort
max.graph.ops.band_part: band_part
max.graph.ops.bottom_k: bottom_k
max.graph.ops.broadcast: distributed_broadcast
max.graph.ops.broadcast_to: broadcast_to
max.graph.ops.buffer: buffer_create buffer_load buffer_store buffer_store_slice
max.graph.ops.bundled_allreduce
max.graph.ops.call: call
max.graph.ops.cast: cast
max.graph.ops.chunk: chunk
max.graph.ops.complex: as_interleaved_complex mul
max.graph.ops.concat: concat
max.graph.ops.conditional: cond
max.graph.ops.constant: constant constant_external
max.graph.ops.conv: conv2d conv3d
max.graph.ops.conv_transpose: conv2d_transpose
max.graph.ops.cumsum: cumsum
max.graph.ops.custom: custom inplace_custom
max.graph.ops.debug: print
max.graph.ops.distributed_ep
max.graph.ops.distributed_scatter: distributed_scatter
max.graph.ops.elementwise: acos div floor_div gelu sigmoid silu
max.graph.ops.flatten: flatten
max.graph.ops.fold: fold
max.graph.ops.gather: gather gather_nd
max.graph.ops.group_norm: group_norm
max.graph.ops.hann_window: hann_window
max.graph.ops.irfft: irfft
max.graph.ops.layer_norm: layer_norm
max.graph.ops.matmul: matmul
max.graph.ops.nms: non_maximum_suppression
max.graph.ops.nonzero: nonzero
max.graph.ops.outer: outer
max.graph.ops.pad: pad
max.graph.ops.parallel: parallel
max.graph.ops.permute: permute
max.graph.ops.pooling: avg_pool2d max_pool2d roi_align
max.graph.ops.quantized: dequantize qmatmul repack_gguf_quantized_weights
max.graph.ops.random: SeedType assert_scalar gaussian set_seed uniform
max.graph.ops.range: range
max.graph.ops.rebind: rebind
max.graph.ops.reduce_scatter_rms_norm: reduce_scatter_rms_norm
max.graph.ops.reducescatter
max.graph.ops.reduction: argmax argmin mean prod sum
max.graph.ops.repeat_interleave: repeat_interleave
max.graph.ops.reshape: reshape
max.graph.ops.resize: InterpolationMode resize resize_bicubic resize_linear resize_nearest
max.graph.ops.rms_norm: rms_norm
max.graph.ops.scatter: masked_scatter scatter scatter_add scatter_max scatter_min scatter_mul scatter_nd
    scatter_nd_add scatter_nd_max scatter_nd_min scatter_nd_mul
max.graph.ops.sequence: side_stream
max.graph.ops.shape_to_tensor: shape_to_tensor
max.graph.ops.shard_and_stack: shard_and_stack
max.graph.ops.slice_tensor: slice_tensor
max.graph.ops.split: split
max.graph.ops.squeeze: squeeze
max.graph.ops.stack: stack
max.graph.ops.support
max.graph.ops.tile: tile
max.graph.ops.top_k: top_k
max.graph.ops.transfer_to: transfer_to
max.graph.ops.transpose: transpose
max.graph.ops.unsqueeze: unsqueeze
max.graph.ops.utils
max.graph.ops.validation: assert_same_device
max.graph.ops.where: where
max.graph.ops.while_loop: while_loop
max.graph.quantization: BlockParameters QuantizationConfig QuantizationEncoding
max.graph.shape: Shape
max.graph.type: BufferType DeviceKind DeviceRef TensorType Type
max.graph.value: BufferValue HasTensorValue TensorValue Value
max.graph.weight: ShardingStrategy Weight
max.graph.weights.format: WeightsFormat weights_format
max.graph.weights.load: load_weights
max.graph.weights.load_gguf: GGUFWeights
max.graph.weights.load_safetensors: SafetensorWeights
max.graph.weights.weights: WeightData Weights
"""


def imports(seed: int) -> list[str]:
    lines: list[str] = []
    for entry in HOMES.strip().replace("\n    ", " ").splitlines():
        module, _, names = entry.partition(":")
        lines.append(f"import {module}")
        lines += [f"from {module} import {name}; {name} is not None" for name in names.split()]
        package, _, last = module.rpartition(".")
        lines.append(f"from {package} import {last}; {last} is not None")
    return list(dict.fromkeys(lines))


FAMILY = plain_family("import max.driver; type(max.driver.__version__).__name__", {}, more=imports)
