"""The parts that pipelines are made of. Names are loaded when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._earlier import earlier_names

if TYPE_CHECKING:
    from max.pipelines.lib.config import AudioGenerationConfig, PipelineConfig
    from max.pipelines.lib.config_enums import PipelineRole, RepoType, RopeType, SupportedEncoding
    from max.pipelines.lib.hf_utils import (
        HuggingFaceRepo,
        download_weight_files,
        generate_local_model_path,
        try_to_load_from_cache,
    )
    from max.pipelines.lib.interfaces import (
        AlwaysSignalBuffersMixin,
        GenerateMixin,
        KVCacheMixin,
        ModelInputs,
        ModelOutputs,
        PipelineModel,
        WeightsAdapter,
        get_paged_manager,
        upper_bounded_default,
    )
    from max.pipelines.lib.model_config import (
        KVCacheConfig,
        MAXModelConfig,
        MAXModelConfigBase,
        ProfilingConfig,
        SamplingConfig,
    )
    from max.pipelines.lib.pipeline_variants.text_generation import TextGenerationPipeline
    from max.pipelines.lib.registry import (
        PIPELINE_REGISTRY,
        PipelineRegistry,
        SupportedArchitecture,
        get_pipeline_for_task,
    )
    from max.pipelines.lib.tokenizer import (
        IdentityPipelineTokenizer,
        PreTrainedPipelineTokenizer,
        TextTokenizer,
    )

_LIB = "max.pipelines.lib."
_WHERE = {
    "AudioGenerationConfig": _LIB + "config",
    "PipelineConfig": _LIB + "config",
    "PipelineRole": _LIB + "config_enums",
    "RepoType": _LIB + "config_enums",
    "RopeType": _LIB + "config_enums",
    "SupportedEncoding": _LIB + "config_enums",
    "HuggingFaceRepo": _LIB + "hf_utils",
    "download_weight_files": _LIB + "hf_utils",
    "generate_local_model_path": _LIB + "hf_utils",
    "try_to_load_from_cache": _LIB + "hf_utils",
    "AlwaysSignalBuffersMixin": _LIB + "interfaces",
    "GenerateMixin": _LIB + "interfaces",
    "KVCacheMixin": _LIB + "interfaces",
    "ModelInputs": _LIB + "interfaces",
    "ModelOutputs": _LIB + "interfaces",
    "PipelineModel": _LIB + "interfaces",
    "WeightsAdapter": _LIB + "interfaces",
    "get_paged_manager": _LIB + "interfaces",
    "upper_bounded_default": _LIB + "interfaces",
    "KVCacheConfig": _LIB + "model_config",
    "MAXModelConfig": _LIB + "model_config",
    "MAXModelConfigBase": _LIB + "model_config",
    "ProfilingConfig": _LIB + "model_config",
    "SamplingConfig": _LIB + "model_config",
    "TextGenerationPipeline": _LIB + "pipeline_variants.text_generation",
    "PIPELINE_REGISTRY": _LIB + "registry",
    "PipelineRegistry": _LIB + "registry",
    "SupportedArchitecture": _LIB + "registry",
    "get_pipeline_for_task": _LIB + "registry",
    "IdentityPipelineTokenizer": _LIB + "tokenizer",
    "PreTrainedPipelineTokenizer": _LIB + "tokenizer",
    "TextTokenizer": _LIB + "tokenizer",
}

__all__ = [
    "AlwaysSignalBuffersMixin",
    "AudioGenerationConfig",
    "GenerateMixin",
    "HuggingFaceRepo",
    "IdentityPipelineTokenizer",
    "KVCacheConfig",
    "KVCacheMixin",
    "MAXModelConfig",
    "MAXModelConfigBase",
    "ModelInputs",
    "ModelOutputs",
    "PIPELINE_REGISTRY",
    "PipelineConfig",
    "PipelineModel",
    "PipelineRegistry",
    "PipelineRole",
    "PreTrainedPipelineTokenizer",
    "ProfilingConfig",
    "RepoType",
    "RopeType",
    "SamplingConfig",
    "SupportedArchitecture",
    "SupportedEncoding",
    "TextGenerationPipeline",
    "TextTokenizer",
    "WeightsAdapter",
    "download_weight_files",
    "generate_local_model_path",
    "get_paged_manager",
    "get_pipeline_for_task",
    "try_to_load_from_cache",
    "upper_bounded_default",
]

__getattr__ = earlier_names(__name__, _WHERE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
