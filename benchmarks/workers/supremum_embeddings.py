"""Vectors of texts by the pipeline of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.embeddings import SIZES, serve_vectors
from benchmarks.runner import peak_memory
from max.interfaces import EmbeddingsGenerationInputs
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.encoders.context import TextEmbeddingContext
from max.pipelines.encoders.embeddings_pipeline import EmbeddingsPipeline

state: dict[str, Any] = {}


def setup(model: str, folder: str) -> dict[str, float]:
    path = str(Path(folder) / f"embeddings-{model}")
    state["pipelines"] = {}
    for budget in SIZES["ours"]:
        config = PipelineConfig(model_path=path, prefill_chunk_size=budget)
        config.resolve()
        architecture = PIPELINE_REGISTRY.architecture_of(config)
        tokenizer: Any = None
        state["pipelines"][budget] = EmbeddingsPipeline(
            config, architecture.pipeline_model, -1, architecture.weight_adapters, tokenizer
        )
    return {}


def vectors(tokens: Sequence[Any], budget: int, part: slice) -> dict[int, Any]:
    """The vectors of every ``part.step``-th text; the pipeline makes its own batches."""
    numbers = range(len(tokens))[part]
    batch = {str(i): TextEmbeddingContext(tokens[i]) for i in numbers}
    outputs = state["pipelines"][budget].execute(EmbeddingsGenerationInputs([batch]))
    return {i: outputs[str(i)].embeddings for i in numbers}


if __name__ == "__main__":
    serve_vectors("ours", setup, vectors, memory=peak_memory)
