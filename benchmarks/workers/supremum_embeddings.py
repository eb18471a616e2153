"""Vectors of texts by the pipeline of embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.embeddings import BUDGETS, serve_vectors, texts
from benchmarks.runner import peak_memory
from max.interfaces import EmbeddingsGenerationInputs
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.encoders.context import TextEmbeddingContext
from max.pipelines.encoders.embeddings_pipeline import EmbeddingsPipeline

state: dict[str, Any] = {}


def setup(model: str, folder: str, count: int) -> dict[str, float]:
    path = str(Path(folder) / f"embeddings-{model}")
    state["pipelines"] = {}
    for budget in BUDGETS:
        config = PipelineConfig(model_path=path, prefill_chunk_size=budget)
        config.resolve()
        architecture = PIPELINE_REGISTRY.architecture_of(config)
        tokenizer: Any = None
        state["pipelines"][budget] = EmbeddingsPipeline(
            config, architecture.pipeline_model, -1, architecture.weight_adapters, tokenizer
        )
    contexts = [TextEmbeddingContext(tokens) for tokens in texts(count)]
    state["batch"] = {context.request_id: context for context in contexts}
    return {}


def vectors(budget: int) -> Any:
    """The vectors of all texts."""
    outputs = state["pipelines"][budget].execute(EmbeddingsGenerationInputs([state["batch"]]))
    return [output.embeddings for output in outputs.values()]


if __name__ == "__main__":
    serve_vectors("ours", setup, vectors, BUDGETS, memory=peak_memory)
