"""Modules that other versions of the API have elsewhere, and the modules here that have their names."""

from __future__ import annotations

LIB = "max.pipelines.lib."
CONFIG = "max.pipelines.config."
V26 = "max._compat.pipelines.v26_"
ENCODINGS = "max.pipelines.checkpoints.encodings"
_ENUMS = (CONFIG + "enums", ENCODINGS, "max.pipelines.checkpoints.hub")
_LORA = "max.nn.lora"
_SAMPLING = "max.nn.sampling"
_PAGES = ("max.pipelines.kv_cache.manager", "max.pipelines.kv_cache")
_EMBEDDINGS = ("max.interfaces.embeddings", "max.interfaces")
_MESSAGES = ("max.interfaces.msgpack_numpy",)
_CONFIG = ("max.pipelines.config.model_config",)
_LORA_CONFIG = ("max.pipelines.config.lora_config",)
_TOKENIZER = ("max.pipelines.tokenization.tokenizer",)
_FUNCTIONS = ("max.experimental.functional",)

_FURTHER: dict[str, tuple[str, ...]] = {
    # names of functions are left out: a module of the name would take their place
    **{
        f"max.experimental.functional.{part}": _FUNCTIONS
        for part in ("collective_ops", "creation_ops", "dispatch", "spmd_ops")
    },
    "max.experimental.nn.norm": ("max.nn.module_v3.norm",),
    **{
        f"max.experimental.nn.norm.{part}": ("max.nn.module_v3.norm",)
        for part in ("group_norm", "layer_norm", "rms_norm")
    },
    "max.experimental.nn.rope": ("max.nn.module_v3.rope",),
    "max.experimental.nn.rope.rope": ("max.nn.module_v3.rope",),
    "max.experimental.nn.transparent_module": ("max.nn.module_v3.module",),
    **{
        f"max.experimental.sharding.{part}": ("max._compat.experimental.v26_sharding",)
        for part in ("mappings", "mesh", "placements", "types")
    },
    "max.interfaces.log_probabilities": ("max.interfaces.text_generation",),
    "max.interfaces.status": ("max.interfaces.context",),
    "max.interfaces.logit_processors_type": ("max.interfaces.logit_processors",),
    "max.interfaces.pipeline_variants": ("max.interfaces",),
    "max.interfaces.pipeline_variants.embeddings_generation": _EMBEDDINGS,
    "max.interfaces.utils": _MESSAGES,
    "max.interfaces.utils.serialization": _MESSAGES,
    "max.interfaces.utils.shared_memory": _MESSAGES,
    "max.kv_cache.paged_cache": _PAGES,
    "max.kv_cache.paged_cache.block_manager": ("max.pipelines.kv_cache",),
    "max.kv_cache.paged_cache.cache_manager": _PAGES,
    "max.nn.comm.allreduce": ("max.nn.comm",),
    "max.nn.hooks.print_hook": ("max.nn.hooks",),
    "max.nn.kv_cache.paged_cache": ("max.nn.kv_cache.cache_values",),
    **{f"{_LORA}.{part}": (_LORA,) for part in ("attention_lora", "interfaces", "linear_lora")},
    "max.nn.moe.moe": ("max.nn.moe",),
    "max.nn.moe.sigmoid_router": ("max.nn.moe",),
    **{f"{_SAMPLING}.{part}": (_SAMPLING,) for part in ("min_p", "rejection_sampler")},
    "max.pipelines.context.logit_processors_type": ("max.interfaces.logit_processors",),
    "max.pipelines.core.context_validators": ("max.pipelines.core.validation",),
    "max.pipelines.dataprocessing": _TOKENIZER,
    "max.pipelines.dataprocessing.max_tokens_to_generate": _TOKENIZER,
    "max.pipelines.kv_cache.paged_kv_cache": _PAGES,
    "max.pipelines.kv_cache.paged_kv_cache.block_manager": ("max.pipelines.kv_cache",),
    "max.pipelines.kv_cache.paged_kv_cache.cache_manager": _PAGES,
    "max.pipelines.lib.config.profiling_config": _CONFIG,
    "max.pipelines.lib.interfaces.generate": ("max.pipelines.generation.mixin",),
    "max.pipelines.lib.kv_cache_config": ("max.pipelines.config.kv_cache_config",),
    "max.pipelines.lib.config.lora_config": _LORA_CONFIG,
    "max.pipelines.lib.lora": ("max.pipelines.adapters.manager", *_LORA_CONFIG),
    "max.pipelines.lib.lora_config": _LORA_CONFIG,
    "max.pipelines.lib.profiling_config": _CONFIG,
    "max.pipelines.lib.sampling.sampling_config": _CONFIG,
    "max.pipelines.lib.weight_path_parser": ("max._compat.pipelines.weight_path_parser",),
    "max.pipelines.lora": ("max.interfaces.lora",),
    "max.pipelines.lora.lora_types": ("max.interfaces.lora",),
    "max.pipelines.modeling.dataprocessing": _TOKENIZER,
    "max.pipelines.modeling.dataprocessing.max_tokens_to_generate": _TOKENIZER,
    "max.pipelines.modeling.types.pipeline_variants.embeddings_generation": _EMBEDDINGS,
    "max.pipelines.modeling.types.utils": _MESSAGES,
    "max.pipelines.modeling.types.utils.serialization": _MESSAGES,
    "max.pipelines.modeling.types.utils.shared_memory": _MESSAGES,
    "max.pipelines.request.base": ("max.interfaces.request",),
    "max.pipelines.sampling.sampling": (
        "max.pipelines.sampling.graph",
        "max.pipelines.sampling.rejection",
    ),
    "max.pipelines.sampling.sampling_config": _CONFIG,
}

_OPS = """
allgather argsort band_part bottom_k broadcast broadcast_to buffer call cast chunk concat conditional constant conv
conv_transpose cumsum custom debug flatten fold gather group_norm hann_window irfft layer_norm matmul nms nonzero outer
pad parallel permute pooling quantized range rebind reduction repeat_interleave reshape resize rms_norm scatter sequence
shape_to_tensor shard_and_stack slice_tensor split squeeze stack tile top_k transfer_to transpose unsqueeze validation
where while_loop
""".split()
"""Modules of `max.graph.ops`."""

MODULES: dict[str, tuple[str, ...]] = {
    **_FURTHER,
    **{f"max.graph.ops.{name}": ("max.graph.ops",) for name in _OPS},
    "max.config": ("max._compat.config",),
    "max.driver.buffer": ("max.driver", "max._compat.driver.v26_copies"),
    "max.driver.driver": ("max.driver", "max.driver._device", "max.driver._device_spec"),
    "max.driver.tensor": ("max.driver",),
    "max.engine.api": ("max.engine",),
    "max.experimental.nn": ("max.nn.module_v3",),
    "max.experimental.sharding": ("max._compat.experimental.v26_sharding",),
    "max.experimental.torch": ("max.torch",),
    "max.functional": ("max.experimental.functional",),
    "max.dtype.dtype": ("max.dtype",),
    "max.dtype.dtype_extension": ("max.dtype",),
    "max.graph.buffer_utils": ("max.graph.tensor_utils",),
    "max.graph.dtype": ("max.dtype",),
    "max.graph.dtype_promotion": ("max.graph.ops.staging.promotion", "max.graph"),
    "max.graph.weights.format": ("max.graph.weights",),
    "max.graph.weights.load": ("max.graph.weights",),
    "max.graph.weights.load_gguf": ("max.graph.weights",),
    "max.graph.weights.load_safetensors": ("max.graph.weights",),
    "max.graph.weights.weights": ("max.graph.weights",),
    "max.kv_cache": ("max.pipelines.kv_cache.manager", "max.pipelines.kv_cache"),
    "max.nn.hyper_connection": ("max.nn.layers.hyper_connection",),
    "max.nn.parallel": ("max._compat.nn.parallel",),
    "max.nn.stacked_linear": ("max._compat.nn.stacked_linear",),
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
    "max.pipelines.kv_cache.memory_planner": (V26 + "memory",),
    "max.pipelines.kv_cache.registry": ("max.pipelines.kv_cache.manager",),
    "max.pipelines.lib.config.config": (CONFIG + "pipeline_config",),
    "max.pipelines.lib.config.config_enums": _ENUMS,
    "max.pipelines.lib.config.kv_cache_config": (CONFIG + "kv_cache_config",),
    "max.pipelines.lib.config.model_config": (CONFIG + "model_config",),
    "max.pipelines.lib.config_enums": _ENUMS,
    "max.pipelines.lib.interfaces.arch_config": (V26 + "arch_configs",),
    "max.pipelines.lib.interfaces.batch_processor": (V26 + "batch_processors",),
    "max.pipelines.lib.interfaces.kv_cache": (LIB + "interfaces",),
    "max.pipelines.lib.interfaces.pipeline_model": (LIB + "interfaces", "max.nn.transformer"),
    "max.pipelines.lib.memory_estimation": (V26 + "memory",),
    "max.pipelines.lib.max_config": (CONFIG + "model_config", "max._compat.config"),
    "max.pipelines.lib.model_config": (CONFIG + "model_config",),
    "max.pipelines.lib.pipeline": (LIB + "interfaces", "max.pipelines"),
    "max.pipelines.lib.pipeline_args": (V26 + "config",),
    "max.pipelines.lib.pipeline_runtime_config": (V26 + "config",),
    "max.pipelines.lib.utils": (V26 + "models", V26 + "arch_configs"),
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
        "max._compat.pipelines.weight_path_parser",
    ),
    "max.pipelines.weights.hf_utils": ("max.pipelines.checkpoints.hub",),
    "max.pipelines.weights.weight_path_parser": ("max._compat.pipelines.weight_path_parser",),
    "max.pipelines.tokenizer": (LIB + "tokenizer",),
    "max.random": ("max.experimental.random",),
    "max.tensor": ("max.experimental.tensor",),
    "max.tree": ("max._compat.tree",),
    "max.torch.torch": ("max.torch",),
    # architectures that are one file here, in the folder of their family
    **{
        f"max.pipelines.architectures.{name}{part}": (
            f"max.pipelines.architectures.{name.rstrip('23')}.{name}",
        )
        for name in ("gemma3", "granite", "mistral", "olmo", "olmo2", "phi3", "qwen2", "qwen3")
        for part in ("", ".arch", ".model", ".model_config")
        if part or name[-1].isdigit()
    },
}
"""A module of another version, and the modules that have its names; submodules go along."""
