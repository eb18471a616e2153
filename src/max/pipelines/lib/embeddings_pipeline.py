"""Documented path of the pipeline of embeddings: see `max.pipelines.encoders`."""

from __future__ import annotations

from max._earlier import earlier_names
from max.pipelines.encoders.embeddings_pipeline import EmbeddingsPipeline

__all__ = ["EmbeddingsPipeline"]

__getattr__ = earlier_names(__name__)
