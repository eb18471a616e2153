"""Names as other versions of the API have them, and where they are here.

Keyword arguments of other versions: `later_keywords`. Modules and their names are in two tables. `MODULES`: modules
that stand elsewhere here; a finder of `sys.meta_path` makes them when they are imported. `NAMES`: names that a module
had or will have, for the module's own ``__getattr__``, which also tells of names that are absent (`max._absent`)::

    __getattr__ = earlier_names(__name__)

Objects are the same ones under each name. Nothing of `max` is imported before a name is looked up.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from max import _absent
from max._module_paths import PATHS

if TYPE_CHECKING:
    from importlib.abc import Loader as _Loader
else:
    # importlib.abc imports much, and every `import max` comes here
    _Loader = object

LIB = "max.pipelines.lib."
CONFIG = "max.pipelines.config."
MODELS = "max.pipelines.models."
_ENCODINGS = "max.pipelines.checkpoints.encodings"
_ENUMS = (CONFIG + "enums", _ENCODINGS, "max.pipelines.checkpoints.hub")

_OPS = """
argsort band_part bottom_k broadcast_to cast chunk conditional conv_transpose cumsum debug flatten fold group_norm
hann_window layer_norm nms nonzero outer pad parallel permute rebind repeat_interleave reshape rms_norm
scatter sequence shape_to_tensor shard_and_stack slice_tensor split squeeze stack tile top_k transfer_to transpose
unsqueeze validation where
""".split()
"""Modules of `max.graph.ops`."""

MODULES: dict[str, tuple[str, ...]] = {
    **PATHS,
    **{f"max.graph.ops.{name}": ("max.graph.ops",) for name in _OPS},
    "max.driver.buffer": ("max.driver", "max.driver._copies"),
    "max.driver.driver": ("max.driver", "max.driver._device", "max.driver._device_spec"),
    "max.driver.tensor": ("max.driver",),
    "max.engine.api": ("max.engine",),
    "max.experimental.nn": ("max.nn.module_v3",),
    "max.experimental.torch": ("max.torch",),
    "max.functional": ("max.experimental.functional",),
    "max.dtype.dtype": ("max.dtype",),
    "max.dtype.dtype_extension": ("max.dtype",),
    "max.graph.buffer_utils": ("max.graph.tensor_utils",),
    "max.graph.dtype": ("max.dtype",),
    "max.graph.dtype_promotion": ("max.graph.ops.promotion", "max.graph"),
    "max.graph.weights.format": ("max.graph.weights",),
    "max.graph.weights.load": ("max.graph.weights",),
    "max.graph.weights.load_gguf": ("max.graph.weights",),
    "max.graph.weights.load_safetensors": ("max.graph.weights",),
    "max.graph.weights.weights": ("max.graph.weights",),
    "max.kv_cache": ("max.pipelines.kv_cache.manager", "max.pipelines.kv_cache"),
    "max.nn.hyper_connection": ("max.nn.layers.hyper_connection",),
    "max.nn.parallel": ("max._compat.nn.parallel",),
    "max.nn.stacked_linear": ("max.nn.layers.stacked_linear",),
    "max.nn.data_parallelism": ("max._compat.nn.device_splits",),
    "max.nn.kv_cache.metrics": ("max._compat.nn.kv_cache",),
    "max.nn.kv_cache.utils": ("max._compat.nn.kv_cache",),
    "max.nn.parallel.numpy_parallel_ops": ("max._compat.nn.parallel",),
    "max.nn.kv_cache.input_types": ("max.nn.kv_cache.cache_values",),
    "max.nn.layer.layer": ("max.nn.layer",),
    "max.nn.layer.layer_list": ("max.nn.layer",),
    "max.nn.layer.missing_layer": ("max.nn.identity",),
    "max.nn.legacy": ("max.nn",),
    "max.nn.moe.moe_fp8": ("max.nn.moe",),
    "max.nn.norm.group_norm": ("max.nn.norm",),
    "max.nn.norm.layer_norm": ("max.nn.norm",),
    "max.nn.norm.rms_norm": ("max.nn.norm",),
    "max.pipelines.architectures.llama3_legacy": ("max.pipelines.architectures.llama3",),
    "max.pipelines.context": ("max.pipelines.core", "max.interfaces"),
    **{
        f"max.pipelines.context.{part}": ("max.pipelines.core", "max.interfaces")
        for part in (
            "context",
            "context_validators",
            "exceptions",
            "outputs",
            "sampling_params",
            "status",
            "tokens",
        )
    },
    "max.pipelines.interfaces": ("max.interfaces", LIB + "interfaces"),
    "max.pipelines.kv_cache.config": (CONFIG + "kv_cache_config",),
    "max.pipelines.kv_cache.memory_planner": ("max.pipelines.registry.memory_planner",),
    "max.pipelines.kv_cache.registry": ("max.pipelines.kv_cache.manager",),
    "max.pipelines.lib.config.config": (CONFIG + "pipeline_config",),
    "max.pipelines.lib.config.config_enums": _ENUMS,
    "max.pipelines.lib.config.kv_cache_config": (CONFIG + "kv_cache_config",),
    "max.pipelines.lib.config.model_config": (CONFIG + "model_config",),
    "max.pipelines.lib.config_enums": _ENUMS,
    "max.pipelines.lib.interfaces.arch_config": (MODELS + "arch_config",),
    "max.pipelines.lib.interfaces.batch_processor": (MODELS + "batch_processor",),
    "max.pipelines.lib.interfaces.kv_cache": (LIB + "interfaces",),
    "max.pipelines.lib.interfaces.pipeline_model": (LIB + "interfaces", "max.nn.transformer"),
    "max.pipelines.lib.memory_estimation": (MODELS + "pipeline_model",),
    "max.pipelines.lib.max_config": (CONFIG + "model_config", "max.config"),
    "max.pipelines.lib.model_config": (CONFIG + "model_config",),
    "max.pipelines.lib.pipeline": (LIB + "interfaces", "max.pipelines"),
    "max.pipelines.lib.pipeline_args": (CONFIG + "later_config",),
    "max.pipelines.lib.pipeline_runtime_config": (CONFIG + "later_config",),
    "max.pipelines.lib.utils": (MODELS + "model_templates", MODELS + "arch_config"),
    "max.pipelines.modeling": ("max.interfaces",),
    "max.pipelines.modeling.config_enums": _ENUMS,
    "max.pipelines.modeling.types": ("max.interfaces",),
    **{
        f"max.pipelines.modeling.types.{part}": ("max.interfaces",)
        for part in ("pipeline", "pipeline_variants", "task", "tokenizer")
    },
    "max.pipelines.nn": ("max.nn",),
    "max.pipelines.request": ("max.interfaces",),
    "max.pipelines.weights": (
        "max.pipelines.checkpoints.hub",
        "max.pipelines.checkpoints.weight_path_parser",
    ),
    "max.pipelines.weights.hf_utils": ("max.pipelines.checkpoints.hub",),
    "max.pipelines.weights.weight_path_parser": ("max.pipelines.checkpoints.weight_path_parser",),
    "max.pipelines.tokenizer": (LIB + "tokenizer",),
    "max.random": ("max.experimental.random",),
    "max.tensor": ("max.experimental.tensor",),
    "max.torch.torch": ("max.torch",),
    # architectures that are one file here
    **{
        f"max.pipelines.architectures.{name}.{part}": (f"max.pipelines.architectures.{name}",)
        for name in ("gemma3", "granite", "mistral", "olmo", "olmo2", "phi3", "qwen2", "qwen3")
        for part in ("arch", "model", "model_config")
    },
}
"""A module of another version, and the modules that have its names; submodules go along."""

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
        name: MODELS + "arch_config"
        for name in (
            "ArchConfig", "ArchConfigWithAttentionKVCache", "ArchConfigWithBoundedMaxSeqLen", "ArchConfigWithKVCache",
            "ArchConfigWithPermissiveMaxSeqLen", "ArchConfigWithStoredKVParams",
        )
    },
    **{
        name: MODELS + "batch_processor"
        for name in (
            "BatchProcessor", "BatchProcessorRuntime", "PaddedEncoderBatchProcessor", "RaggedBatchProcessor",
            "SingleReplicaEmbeddingBatchProcessor", "SingleReplicaRaggedBatchProcessor",
            "build_single_replica_ragged_token_arrays", "process_ragged_kv_outputs", "ragged_kv_symbolic_inputs",
            "single_replica_context_batch",
        )
    },
    **{
        name: MODELS + "model_templates"
        for name in (
            "CompilationTimer", "GraphPipelineModel", "GraphPipelineModelWithKVCache", "PipelineModelWithKVCache",
        )
    },
    **{
        name: "max.config"
        for name in (
            "MAXConfig", "convert_max_config_value", "deep_merge_max_configs",
            "get_default_max_config_file_section_name",
        )
    },
    "MemoryPlan": MODELS + "pipeline_model",
    "PipelineArgs": CONFIG + "later_config",
    "PipelineRuntimeConfig": CONFIG + "later_config",
    "WeightPathParser": "max.pipelines.checkpoints.weight_path_parser",
    **{
        name: _ENCODINGS
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
        "logits": "apply_packed_bitmask apply_packed_bitmask_with_penalties argmax_with_bias top_k_per_row "
        "topk_topp_masked_probs",
        "norms": "apply_qk_rms_norm mtp_eh_norm row_mean_of_squares row_mean_of_squares_qk rms_norm_value_cache "
        "fused_qk_ragged_rms_norm",
        "projections": "fused_qkv_padded_matmul",
        "streams": "hyper_connection_gates",
        "rope": "rope_ragged rope_ragged_with_position_ids fused_qk_rms_norm_rope_ragged rope_split_store_ragged",
    }.items()
    for name in names.split()
}  # fmt: skip

NAMES: dict[str, dict[str, str]] = {
    "max.driver": {
        "CUDA": "max.driver.Accelerator",
        "DeviceQueue": "max.driver.DeviceStream",
        "load_max_buffer": "max.driver._checkpoint_file",
        "load_max_tensor": "max.driver._checkpoint_file",
        "batch_inplace_copy": "max.driver._copies",
        "copy_pinned_to_destinations": "max.driver._copies",
    },
    "max.engine": {
        "CompilationStopped": "max.engine.debug_config",
        "CompiledModel": "max.engine._compiled",
        "DebugConfig": "max.engine.debug_config",
        "PrintStyle": "max.engine.debug_config",
        "DType": "max.dtype",
        "read": "max.engine._compiled",
    },
    "max.graph": {
        "DType": "max.dtype",
        "DevicePlacementPolicy": "max.graph.later_options",
        "GraphDebugConfig": "max.graph.later_options",
        "ProfileScopeColor": "max.graph.later_options",
        "default_custom_extensions": "max.graph.kernel_library",
        "default_custom_extensions_scope": "max.graph.kernel_library",
    },
    "max.graph.ops.pooling": {"roi_align": "max.graph.ops.detection"},
    "max.graph.ops.resize": {
        name: "max.graph.ops.resample"
        for name in ("resize_bicubic", "resize_linear", "resize_nearest")
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
            for name in ("PagedKVCacheManager", "estimate_kv_cache_size", "load_kv_manager")
        },
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
        "FusedMLP": "max.nn.layers.stacked_linear",
        "StackedLinear": "max.nn.layers.stacked_linear",
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
    "max.pipelines.core": {"PipelineTask": "max.interfaces"},
    "max.pipelines.kv_cache": {
        "InsufficientBlocksError": "max.pipelines.kv_cache.page_manager.OutOfPagesError",
        "KVCacheConfig": CONFIG + "kv_cache_config",
        "KVCacheParams": "max.nn.kv_cache",
        "KVCacheStrategy": "max.nn.kv_cache",
        "MemoryPlanner": "max.pipelines.registry.memory_planner",
        "PagedKVCacheManager": "max.pipelines.kv_cache.manager",
        "estimate_kv_cache_size": "max.pipelines.kv_cache.manager",
        "load_kv_manager": "max.pipelines.kv_cache.manager",
    },
    "max.pipelines.lib": _LIB_NAMES,
    "max.pipelines.lib.config": {
        **{
            name: where
            for name, where in _LIB_NAMES.items()
            if name == "PipelineArgs" or where == _ENCODINGS
        },
        "PipelineRole": CONFIG + "enums",
        "RepoType": "max.pipelines.checkpoints.hub",
        "RopeType": CONFIG + "enums",
        "SupportedEncoding": _ENCODINGS,
    },
    "max.pipelines.lib.interfaces": {
        name: _LIB_NAMES[name] for name in _LIB_NAMES if _LIB_NAMES[name].startswith(MODELS)
    },
}
"""For each module, names of other versions; the value is a module, or a module and another name in it."""

# parents of MODULES that are files here: they count as packages, so that their submodules can be imported
_PARENTS = frozenset(name.rpartition(".")[0] for name in MODULES)


def _target(name: str) -> tuple[str, ...] | None:
    """The modules that stand for a name: by its longest beginning in `MODULES`."""
    head, tail = name, ""
    while head:
        if head in MODULES:
            return tuple(module + tail for module in MODULES[head])
        head, dot, last = head.rpartition(".")
        tail = dot + last + tail
    return None


class _Alias(_Loader):
    """Makes a module whose names are those of others."""

    def __init__(self, targets: tuple[str, ...]) -> None:
        self.targets = targets

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        targets = [importlib.import_module(target) for target in self.targets]
        public = [
            name
            for target in targets
            for name in getattr(target, "__all__", [n for n in dir(target) if n[0] != "_"])
        ]

        def lookup(name: str) -> Any:
            for target in targets:
                try:
                    return getattr(target, name)
                except AttributeError:
                    continue
            if _absent.message(f"{module.__name__}.{name}") is not None:
                raise _absent.missing(module.__name__, name)
            where = " or ".join(self.targets)
            raise AttributeError(
                f"module {module.__name__!r} has no attribute {name!r}; its names are in {where}"
            )

        # attributes as far as nothing more is imported for them: tools read them without running code
        for target in reversed(targets):
            own = NAMES.get(target.__name__, {})
            names = [name for name, where in own.items() if where.startswith(target.__name__ + ".")]
            names += [name for name in getattr(target, "__all__", ()) if name in vars(target)]
            module.__dict__.update({name: getattr(target, name) for name in names})
        module.__dict__.update(
            __doc__=f"Another version's name of {', '.join(self.targets)}.",
            __all__=sorted(set(public)),
            __getattr__=lookup,
            __dir__=lambda: sorted(set(public)),
        )


class _Finder:
    """Finds the modules of `MODULES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("max."):
            return None
        if fullname in _PARENTS and fullname not in MODULES:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.submodule_search_locations is None:
                spec.submodule_search_locations = []
            return spec
        modules = _target(fullname)
        if modules is None:
            return None
        existing = tuple(module for module in modules if _exists(module))
        return ModuleSpec(fullname, _Alias(existing), is_package=True) if existing else None


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def install() -> None:
    """Lets the modules of `MODULES` be imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def earlier_names(
    module: str, own: Mapping[str, str] | None = None, *, submodules: bool = False
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that has names in `NAMES`, or loads its own when they are used.

    Args:
        module: Its ``__name__``.
        own: Names of its own, and the modules that define them.
        submodules: Whether its modules are loaded when they are used as attributes.
    """
    names = {**NAMES.get(module, {}), **(own or {})}

    def lookup(name: str) -> Any:
        path = f"{module}.{name}"
        if name not in names and (
            path in MODULES or (submodules and name[0] != "_" and _exists(path))
        ):
            return importlib.import_module(path)
        if name not in names:
            raise _absent.missing(module, name)
        where, last = names[name], name
        # modules are lower case, classes are not
        if where.rpartition(".")[2][0].isupper():
            where, _, last = where.rpartition(".")
        value = getattr(importlib.import_module(where), last)
        setattr(sys.modules[module], name, value)
        return value

    return lookup


_F = TypeVar("_F", bound=Callable[..., Any])


def later_keywords(**names: str) -> Callable[[_F], _F]:
    """Lets a function take arguments by the keywords of other versions too.

    Args:
        names: For each other keyword the name of the parameter here.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            for other in names.keys() & kwargs.keys():
                own = names[other]
                if own in kwargs:
                    raise TypeError(f"{function.__name__}: {other} and {own} are one argument")
                kwargs[own] = kwargs.pop(other)
            return function(*args, **kwargs)

        return renamed  # pyright: ignore[reportReturnType]

    return decorate
