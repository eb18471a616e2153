"""Documented path of the pipeline of text: see `max.pipelines.generation`."""

from __future__ import annotations

from max._names import lazy_names
from max.pipelines.generation.text_generation import BatchInfo, TextGenerationPipeline

__all__ = ["BatchInfo", "TextGenerationPipeline"]

__getattr__ = lazy_names(__name__)
