"""Documented parts of MAX that this release lacks, and what does their work here.

One table of patterns. A finder at the end of `sys.meta_path` tells of modules, a module's ``__getattr__``
(`max._earlier`) of names. What exists is found before either is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from opcode import opmap
from types import ModuleType
from typing import TYPE_CHECKING

from max._lazy import lazy_module

if TYPE_CHECKING:
    import fnmatch
    from pathlib import Path
else:
    # every `import max` comes here
    fnmatch = lazy_module("fnmatch")

_GRAPHS = "Stage a max.graph.Graph, and run it with max.engine.InferenceSession."
_ADAPTERS = "LoRA adapters are absent; merge one into the weights before they are loaded."
_DRAFTS = "Speculative decoding is absent; TextGenerationPipeline generates without a draft model."
_GPUS = "It is of GPUs and their streams; what runs on a device here runs in order."
_COLLECTIVES = (
    "It is for several GPUs; the collectives of max.nn.comm are there, and norms of their own."
)
_SHARDING = "A tensor is on one device; modules of max.nn are split by max.graph.ShardingStrategy."
_MODULE_ADAPTERS = (
    "max.nn.LinearLoRA has adapters for each sequence; one adapter is merged into the weights."
)
_ROUTERS = "max.nn.MoE takes a gate of your own (gate_cls), and quant_config of 8-bit floats."
_CACHES = "A model has one KVCacheParams; its inputs are those of flattened_kv_inputs (docs/compatibility.md)."
_TEMPLATES = "PipelineModelWithKVCache and GraphPipelineModelWithKVCache are the bases of models (docs/add-a-model.md)."
_PARSERS = "SupportedArchitecture(tool_parser=) takes the name of a format, or a function (docs/compatibility.md)."
_STORE = "Compiled programs are kept in the cache, which MAX_CACHE_DIR names (docs/runtime.md)."
_COMPILER = "It is of MAX's compiler; docs/compiler.md tells of this one."
_COMPLEX = "Complex numbers are pairs of floats: ops.as_interleaved_complex and complex_mul; irfft is there."
_FOREIGN = f"ONNX and TorchScript models are not read, nor by MAX any more. {_GRAPHS}"

ABSENT: dict[str, str] = {
    "max.serve.*": "`max serve` is the server; its parts are no API.",
    "max.benchmark": "`max generate` and Model.profile() say how fast a model is.",
    "max.kernels": "Kernels are written in Python: max.kernel.register makes a custom op of one (docs/custom-ops.md).",
    "max.engine.InputSpec": _FOREIGN,
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
    "max.graph.GraphDebugConfig": _COMPILER,
    "max.graph.DevicePlacementPolicy": _COMPILER,
    "max.graph.ops.allgather_rms_norm*": _COLLECTIVES,
    "max.graph.ops.reduce_scatter_rms_norm*": _COLLECTIVES,
    "max.graph.ops.*fft*": _COMPLEX,
    "max.graph.ops.parallel": _COLLECTIVES,
    "max.graph.ops.shard_and_stack": _COLLECTIVES,
    "max.graph.ops.side_stream": _GPUS,
    "max.experimental.functional.*fft*": _COMPLEX,
    "max.experimental.functional.call_on_mesh": _SHARDING,
    "max.experimental.functional.distributed_*": _SHARDING,
    "max.experimental.functional.shard*": _SHARDING,
    "max.experimental.sharding": _SHARDING,
    "max.experimental.*.DeviceMesh": _SHARDING,
    "max.experimental.*.Sharded": _SHARDING,
    "max.experimental.*.Replicated": _SHARDING,
    "max.experimental.*realization_context": "Operations are recorded until a value is needed (docs/eager.md).",
    "max.experimental.nn.LoRA": _MODULE_ADAPTERS,
    "max.experimental.nn.lora_*": _MODULE_ADAPTERS,
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
    "max.pipelines.*speculative_decoding": _DRAFTS,
    "max.pipelines.*SpeculativeDecoding*": _DRAFTS,
    "max.pipelines.*rejection_sampler*": _DRAFTS,
    "max.pipelines.*TextAndVisionTokenizer": "Models of images are absent; TextTokenizer is for text.",
    "modular.engine": "Its work is done by max.engine.InferenceSession, which loads a max.graph.Graph.",
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
    "LoRAConfig": _ADAPTERS,
    "SpeculativeConfig Speculator UnifiedEagleOutputs UnifiedSpecDecodeInputs": _DRAFTS,
}
LATER: dict[str, dict[str, str]] = {
    "max.driver": {"HostHazardError": _GPUS},
    "max.engine": {
        "ArtifactBodyMismatch CompilationStopped CompileOnlyExecutionError CompileOnlyModel "
        "MissingArtifactError": _STORE
    },
    "max.experimental.functional": {"reduce_scatter": _SHARDING, "side_stream": _GPUS},
    "max.experimental.tensor": {"external_shard_names": _SHARDING},
    "max.graph": {"ProfileScopeColor": _COMPILER},
    "max.graph.ops": {"distributed_broadcast distributed_scatter": _COLLECTIVES},
    "max.nn.comm": {"MulticastPool": _COLLECTIVES},
    "max.nn.kv_cache": {_OF_CACHES: _CACHES},
    "max.nn.kv_cache.cache_params": {_OF_CACHES: _CACHES},
    "max.nn.moe": {
        "EplbExpertContainer GateUpFormat Nvfp4Scales apply_eplb_placement interleaved_block_scales_shape": _ROUTERS
    },
    "max.nn.sampling": {
        "AcceptanceSampler greedy_acceptance_sampler stochastic_acceptance_sampler "
        "synthetic_acceptance_sampler": _DRAFTS
    },
    "max.pipelines": _OF_MODELS,
    "max.pipelines.lib": _OF_MODELS,
    "max.pipelines.lib.interfaces": _OF_MODELS,
}
"""For each module names of later versions, separated by spaces, and what to do instead."""


def message(name: str) -> str | None:
    """What to say of a name that was not found; None where MAX has none either.

    Args:
        name: Its dotted name.
    """
    parts = name.split(".")
    for end in range(2, len(parts) + 1):
        prefix = ".".join(parts[:end])
        for pattern, instead in ABSENT.items():
            if fnmatch.fnmatchcase(prefix, pattern):
                return f"{prefix} is not in this release. {instead}"
    module, _, last = name.rpartition(".")
    for names, instead in LATER.get(module, {}).items():
        if last in names.split():
            return f"{name} is not in this release. {instead}"
    return None


def missing(module: str, name: str, depth: int = 2) -> AttributeError | ImportError:
    """The error for a name that a module has not.

    Args:
        module: The module.
        name: The name.
        depth: How many calls up the user's frame is.
    """
    text = message(f"{module}.{name}")
    if text is None:
        text = f"module {module!r} has no attribute {name!r}"
    else:
        frame = sys._getframe(depth)
        # `from module import name` would put a text of its own in the place of an AttributeError's
        if frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]:
            return ImportError(text, name=module)
    return AttributeError(text, name=name, obj=sys.modules.get(module))


_MOJO = {".mojo", ".mojopkg", ".🔥"}


def mojo_hint(files: Iterable[Path]) -> str:
    """A clause on what to do about kernels in Mojo; empty where there are none.

    Args:
        files: Files, any of which may be one.
    """
    mojo_files = sorted(file.name for file in files if file.suffix in _MOJO)
    if not mojo_files:
        return ""
    return (
        f"; {mojo_files[0]} is a kernel in Mojo, which is not compiled here: write it in the kernel language, "
        "a Python function under @max.kernel.register(name), and graphs that use it stay as they are"
    )


class _Finder:
    """Tells of modules that are absent; finds none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(("max.", "modular.")) and (text := message(fullname)):
            # with the module's name `from package import module` would put a text of its own in its place
            raise ModuleNotFoundError(text, name=None if _in_from_import() else fullname)
        return None


def _in_from_import() -> bool:
    """Whether a module is looked for as a name of a package."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_name == "_handle_fromlist":
            return True
        frame = frame.f_back
    return False


def install() -> None:
    """Lets imports of absent modules say that they are."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
