"""Tables of embeddings."""

from __future__ import annotations

from max._compat.nn.layers_v1 import EmbeddingV1
from max.nn.layers.embedding import Embedding, VocabParallelEmbedding

__all__ = ["Embedding", "EmbeddingV1", "VocabParallelEmbedding"]
