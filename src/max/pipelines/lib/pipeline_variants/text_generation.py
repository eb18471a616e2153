"""Documented path of the pipeline of text: see `max.pipelines.generation`."""

from __future__ import annotations

from max._earlier import earlier_names
from max.pipelines.generation.text_generation import BatchInfo, TextGenerationPipeline

__all__ = ["BatchInfo", "TextGenerationPipeline"]

__getattr__ = earlier_names(__name__)
