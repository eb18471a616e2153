"""Documented path of the pipeline with a draft model: see `max.pipelines.generation`."""

from __future__ import annotations

from max._names import lazy_names
from max.pipelines.generation.speculative_decoding import (
    SpeculativeDecodingMetrics,
    SpeculativeDecodingTextGenerationPipeline,
)

__all__ = ["SpeculativeDecodingMetrics", "SpeculativeDecodingTextGenerationPipeline"]

__getattr__ = lazy_names(__name__)
