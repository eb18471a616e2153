"""The parts that pipelines are made of. Names are loaded when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._names import lazy_names

if TYPE_CHECKING:
    from max.pipelines.checkpoints.encodings import SupportedEncoding
    from max.pipelines.checkpoints.hub import (
        HuggingFaceRepo,
        RepoType,
        download_weight_files,
        generate_local_model_path,
        try_to_load_from_cache,
    )
    from max.pipelines.config.audio_config import AudioGenerationConfig
    from max.pipelines.config.enums import PipelineRole, RopeType
    from max.pipelines.config.kv_cache_config import KVCacheConfig
    from max.pipelines.config.lora_config import LoRAConfig
    from max.pipelines.config.model_config import (
        MAXModelConfig,
        MAXModelConfigBase,
        ProfilingConfig,
        SamplingConfig,
    )
    from max.pipelines.config.pipeline_config import PipelineConfig
    from max.pipelines.encoders.embeddings_pipeline import EmbeddingsPipeline
    from max.pipelines.generation.mixin import GenerateMixin
    from max.pipelines.generation.text_generation import TextGenerationPipeline
    from max.pipelines.models.inputs import ModelInputs, ModelOutputs
    from max.pipelines.models.kv_cache import KVCacheMixin, get_paged_manager
    from max.pipelines.models.pipeline_model import (
        AlwaysSignalBuffersMixin,
        PipelineModel,
        WeightsAdapter,
        upper_bounded_default,
    )
    from max.pipelines.registry.architecture import SupportedArchitecture
    from max.pipelines.registry.registry import (
        PIPELINE_REGISTRY,
        PipelineRegistry,
        get_pipeline_for_task,
    )
    from max.pipelines.sampling.rejection import (
        rejection_sampler,
        rejection_sampler_with_residuals,
    )
    from max.pipelines.tokenization.base_tokenizers import (
        IdentityPipelineTokenizer,
        PreTrainedPipelineTokenizer,
    )
    from max.pipelines.tokenization.tokenizer import (
        TextTokenizer,
    )

_HERE = "max.pipelines."
_WHERE = {
    "AudioGenerationConfig": _HERE + "config.audio_config",
    "PipelineConfig": _HERE + "config.pipeline_config",
    "PipelineRole": _HERE + "config.enums",
    "RepoType": _HERE + "checkpoints.hub",
    "RopeType": _HERE + "config.enums",
    "SupportedEncoding": _HERE + "checkpoints.encodings",
    "HuggingFaceRepo": _HERE + "checkpoints.hub",
    "download_weight_files": _HERE + "checkpoints.hub",
    "generate_local_model_path": _HERE + "checkpoints.hub",
    "try_to_load_from_cache": _HERE + "checkpoints.hub",
    "AlwaysSignalBuffersMixin": _HERE + "models.pipeline_model",
    "EmbeddingsPipeline": _HERE + "encoders.embeddings_pipeline",
    "GenerateMixin": _HERE + "generation.mixin",
    "KVCacheMixin": _HERE + "models.kv_cache",
    "ModelInputs": _HERE + "models.inputs",
    "ModelOutputs": _HERE + "models.inputs",
    "PipelineModel": _HERE + "models.pipeline_model",
    "WeightsAdapter": _HERE + "models.pipeline_model",
    "get_paged_manager": _HERE + "models.kv_cache",
    "upper_bounded_default": _HERE + "models.pipeline_model",
    "KVCacheConfig": _HERE + "config.kv_cache_config",
    "LoRAConfig": _HERE + "config.lora_config",
    "MAXModelConfig": _HERE + "config.model_config",
    "MAXModelConfigBase": _HERE + "config.model_config",
    "ProfilingConfig": _HERE + "config.model_config",
    "SamplingConfig": _HERE + "config.model_config",
    "TextGenerationPipeline": _HERE + "generation.text_generation",
    "PIPELINE_REGISTRY": _HERE + "registry.registry",
    "PipelineRegistry": _HERE + "registry.registry",
    "SupportedArchitecture": _HERE + "registry.architecture",
    "get_pipeline_for_task": _HERE + "registry.registry",
    "rejection_sampler": _HERE + "sampling.rejection",
    "rejection_sampler_with_residuals": _HERE + "sampling.rejection",
    "IdentityPipelineTokenizer": _HERE + "tokenization.base_tokenizers",
    "PreTrainedPipelineTokenizer": _HERE + "tokenization.base_tokenizers",
    "TextTokenizer": _HERE + "tokenization.tokenizer",
}

__all__ = [
    "AlwaysSignalBuffersMixin",
    "AudioGenerationConfig",
    "EmbeddingsPipeline",
    "GenerateMixin",
    "HuggingFaceRepo",
    "IdentityPipelineTokenizer",
    "KVCacheConfig",
    "LoRAConfig",
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
    "rejection_sampler",
    "rejection_sampler_with_residuals",
    "try_to_load_from_cache",
    "upper_bounded_default",
]

__getattr__ = lazy_names(__name__, _WHERE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
