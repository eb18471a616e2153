"""Documented path of the configuration: see `max.pipelines.config`."""

from __future__ import annotations

from max._names import lazy_names
from max.pipelines.config.audio_config import (
    AudioGenerationConfig,
    PrependPromptSpeechTokens,
    PrometheusMetricsMode,
)
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.lora_config import LoRAConfig
from max.pipelines.config.model_config import (
    MAXModelConfig,
    MAXModelConfigBase,
    ProfilingConfig,
    SamplingConfig,
)
from max.pipelines.config.pipeline_config import PipelineConfig

__all__ = [
    "AudioGenerationConfig",
    "PrependPromptSpeechTokens",
    "PrometheusMetricsMode",
    "KVCacheConfig",
    "LoRAConfig",
    "MAXModelConfig",
    "MAXModelConfigBase",
    "ProfilingConfig",
    "SamplingConfig",
    "PipelineConfig",
]

__getattr__ = lazy_names(__name__)
