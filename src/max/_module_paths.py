"""Import paths of MAX 25.7 and 26.7 whose names stand in other modules here: more of `max._earlier.MODULES`."""

from __future__ import annotations

_LORA = "max.nn.lora"
_SAMPLING = "max.nn.sampling"
_PAGES = ("max.pipelines.kv_cache.manager", "max.pipelines.kv_cache")
_EMBEDDINGS = ("max.interfaces.embeddings", "max.interfaces")
_MESSAGES = ("max.interfaces.msgpack_numpy",)
_CONFIG = ("max.pipelines.config.model_config",)
_TOKENIZER = ("max.pipelines.tokenization.tokenizer",)
_FUNCTIONS = ("max.experimental.functional",)

PATHS: dict[str, tuple[str, ...]] = {
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
        f"max.experimental.sharding.{part}": ("max.experimental.sharding",)
        for part in ("mappings", "mesh", "placements", "types")
    },
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
    "max.pipelines.lib.profiling_config": _CONFIG,
    "max.pipelines.lib.sampling.sampling_config": _CONFIG,
    "max.pipelines.lib.weight_path_parser": ("max.pipelines.checkpoints.weight_path_parser",),
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
"""A path of another version, and the modules that have its names."""
