"""Pipelines of text: configuration, tokenizers, page manager, scheduler, generation.

The names here are loaded when they are first used, so that importing a part does not import all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._earlier import earlier_names

if TYPE_CHECKING:
    from max.pipelines.core import TextAndVisionContext, TextContext
    from max.pipelines.lib.config import PipelineConfig
    from max.pipelines.lib.config_enums import PipelineRole, RopeType, SupportedEncoding
    from max.pipelines.lib.hf_utils import HuggingFaceRepo, download_weight_files
    from max.pipelines.lib.interfaces import (
        GenerateMixin,
        KVCacheMixin,
        ModelInputs,
        ModelOutputs,
        PipelineModel,
        upper_bounded_default,
    )
    from max.pipelines.lib.model_config import (
        KVCacheConfig,
        MAXModelConfig,
        ProfilingConfig,
        SamplingConfig,
    )
    from max.pipelines.lib.pipeline_variants.text_generation import TextGenerationPipeline
    from max.pipelines.lib.registry import (
        PIPELINE_REGISTRY,
        PipelineRegistry,
        SupportedArchitecture,
    )
    from max.pipelines.lib.tokenizer import (
        IdentityPipelineTokenizer,
        PreTrainedPipelineTokenizer,
        TextTokenizer,
    )

_LIB = "max.pipelines.lib."
_WHERE = {
    "TextContext": "max.pipelines.core",
    "TextAndVisionContext": "max.pipelines.core",
    "PipelineConfig": _LIB + "config",
    "PipelineRole": _LIB + "config_enums",
    "RopeType": _LIB + "config_enums",
    "SupportedEncoding": _LIB + "config_enums",
    "HuggingFaceRepo": _LIB + "hf_utils",
    "download_weight_files": _LIB + "hf_utils",
    "GenerateMixin": _LIB + "interfaces",
    "KVCacheMixin": _LIB + "interfaces",
    "ModelInputs": _LIB + "interfaces",
    "ModelOutputs": _LIB + "interfaces",
    "PipelineModel": _LIB + "interfaces",
    "upper_bounded_default": _LIB + "interfaces",
    "KVCacheConfig": _LIB + "model_config",
    "MAXModelConfig": _LIB + "model_config",
    "ProfilingConfig": _LIB + "model_config",
    "SamplingConfig": _LIB + "model_config",
    "TextGenerationPipeline": _LIB + "pipeline_variants.text_generation",
    "PIPELINE_REGISTRY": _LIB + "registry",
    "PipelineRegistry": _LIB + "registry",
    "SupportedArchitecture": _LIB + "registry",
    "IdentityPipelineTokenizer": _LIB + "tokenizer",
    "PreTrainedPipelineTokenizer": _LIB + "tokenizer",
    "TextTokenizer": _LIB + "tokenizer",
}

__all__ = [
    "PIPELINE_REGISTRY",
    "GenerateMixin",
    "HuggingFaceRepo",
    "IdentityPipelineTokenizer",
    "KVCacheConfig",
    "KVCacheMixin",
    "MAXModelConfig",
    "ModelInputs",
    "ModelOutputs",
    "PipelineConfig",
    "PipelineModel",
    "PipelineRegistry",
    "PipelineRole",
    "PreTrainedPipelineTokenizer",
    "ProfilingConfig",
    "RopeType",
    "SamplingConfig",
    "SupportedArchitecture",
    "SupportedEncoding",
    "TextAndVisionContext",
    "TextContext",
    "TextGenerationPipeline",
    "TextTokenizer",
    "download_weight_files",
    "upper_bounded_default",
]


__getattr__ = earlier_names(__name__, _WHERE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
