"""Pipelines of text: configuration, tokenizers, page manager, scheduler, generation.

The names here are loaded when they are first used, so that importing a part does not import all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._lazy import lazy_module
from max._names import lazy_names
from max.pipelines.config.resolver import set_resolver
from max.pipelines.forms import set_forms

if TYPE_CHECKING:
    from max.pipelines.checkpoints.encodings import SupportedEncoding
    from max.pipelines.checkpoints.hub import HuggingFaceRepo, download_weight_files
    from max.pipelines.config.enums import PipelineRole, RopeType
    from max.pipelines.config.kv_cache_config import KVCacheConfig
    from max.pipelines.config.lora_config import LoRAConfig
    from max.pipelines.config.model_config import (
        MAXModelConfig,
        ProfilingConfig,
        SamplingConfig,
    )
    from max.pipelines.config.pipeline_config import PipelineConfig
    from max.pipelines.core import TextAndVisionContext, TextContext
    from max.pipelines.generation.mixin import GenerateMixin
    from max.pipelines.generation.text_generation import TextGenerationPipeline
    from max.pipelines.models.inputs import ModelInputs, ModelOutputs
    from max.pipelines.models.kv_cache import KVCacheMixin
    from max.pipelines.models.pipeline_model import PipelineModel, upper_bounded_default
    from max.pipelines.registry import resolution
    from max.pipelines.registry.architecture import SupportedArchitecture
    from max.pipelines.registry.registry import PIPELINE_REGISTRY, PipelineRegistry
    from max.pipelines.tokenization.base_tokenizers import (
        IdentityPipelineTokenizer,
        PreTrainedPipelineTokenizer,
    )
    from max.pipelines.tokenization.tokenizer import (
        TextTokenizer,
    )
else:
    resolution = lazy_module("max.pipelines.registry.resolution")

# declarations of other versions
set_forms(lazy_module("max._compat.pipelines.v26_forms"))
# configurations and GGUF files are below the registry, which completes the former and has the forms of the latter
set_resolver(resolution)

_HERE = "max.pipelines."
_WHERE = {
    "TextContext": _HERE + "core",
    "TextAndVisionContext": _HERE + "core",
    "PipelineConfig": _HERE + "config.pipeline_config",
    "PipelineRole": _HERE + "config.enums",
    "RopeType": _HERE + "config.enums",
    "SupportedEncoding": _HERE + "checkpoints.encodings",
    "HuggingFaceRepo": _HERE + "checkpoints.hub",
    "download_weight_files": _HERE + "checkpoints.hub",
    "GenerateMixin": _HERE + "generation.mixin",
    "KVCacheMixin": _HERE + "models.kv_cache",
    "ModelInputs": _HERE + "models.inputs",
    "ModelOutputs": _HERE + "models.inputs",
    "PipelineModel": _HERE + "models.pipeline_model",
    "upper_bounded_default": _HERE + "models.pipeline_model",
    "KVCacheConfig": _HERE + "config.kv_cache_config",
    "LoRAConfig": _HERE + "config.lora_config",
    "MAXModelConfig": _HERE + "config.model_config",
    "ProfilingConfig": _HERE + "config.model_config",
    "SamplingConfig": _HERE + "config.model_config",
    "TextGenerationPipeline": _HERE + "generation.text_generation",
    "PIPELINE_REGISTRY": _HERE + "registry.registry",
    "PipelineRegistry": _HERE + "registry.registry",
    "SupportedArchitecture": _HERE + "registry.architecture",
    "IdentityPipelineTokenizer": _HERE + "tokenization.base_tokenizers",
    "PreTrainedPipelineTokenizer": _HERE + "tokenization.base_tokenizers",
    "TextTokenizer": _HERE + "tokenization.tokenizer",
}

__all__ = [
    "PIPELINE_REGISTRY",
    "GenerateMixin",
    "HuggingFaceRepo",
    "IdentityPipelineTokenizer",
    "KVCacheConfig",
    "LoRAConfig",
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


__getattr__ = lazy_names(__name__, _WHERE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
