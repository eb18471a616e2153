"""Documented path of the pipeline of embeddings: see `max.pipelines.encoders`."""

from __future__ import annotations

from max._names import lazy_names
from max.pipelines.encoders.embeddings_pipeline import EmbeddingsPipeline

__all__ = ["EmbeddingsPipeline"]

__getattr__ = lazy_names(__name__)
