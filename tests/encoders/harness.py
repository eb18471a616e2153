"""Random checkpoints of transformers' encoders, and the pipelines that run them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from max.interfaces import EmbeddingsGenerationInputs, PipelineTask
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.encoders.context import TextEmbeddingContext
from max.pipelines.encoders.embeddings_pipeline import EmbeddingsPipeline

VOCAB = 99
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
DISTIL = {
    "vocab_size": VOCAB,
    "dim": 32,
    "hidden_dim": 44,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("Bert", SMALL | {"hidden_act": "relu"}),
    "Roberta": ("Roberta", SMALL),
    "XLMRoberta": ("XLMRoberta", SMALL | {"type_vocab_size": 1, "max_position_embeddings": 50}),
    "DistilBert": ("DistilBert", DISTIL),
    "MPNet": ("MPNet", SMALL | {"max_position_embeddings": 200}),
    "ModernBert": (
        "ModernBert",
        SMALL | {"local_attention": 8, "num_hidden_layers": 5, "classifier_pooling": "mean"},
    ),
    "ModernBert biases": (
        "ModernBert",
        SMALL
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "local_attention": 13,
        },
    ),
    "NomicBert": ("NomicBert", SMALL | {"head_dim": 8}),
    "EmbeddingGemma": (
        "Gemma3Text",
        SMALL
        | {
            "use_bidirectional_attention": True,
            "sliding_window": 9,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "query_pre_attn_scalar": 12,
            "num_hidden_layers": 7,
        },
    ),
    "Gemma3 causal": (
        "Gemma3Text",
        SMALL | {"sliding_window": 5, "num_key_value_heads": 1, "head_dim": 8, "layer_types":
                 ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "Qwen3": ("Qwen3", SMALL | {"num_key_value_heads": 2, "head_dim": 6, "attention_bias": True}),
}  # fmt: skip
CLASSIFIERS = [name for name, (family, _) in CASES.items() if family != "Gemma3Text"]


def randomized(model: torch.nn.Module) -> None:
    """Sets norms and biases to random values, as 1 and 0 would hide errors."""
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 1:
                value.add_(torch.randn_like(value) * 0.1)
            else:
                value.copy_(torch.randn_like(value) * 0.15)


@cache
def checkpoint(case: str, kind: str = "Model", dtype: str = "float32") -> tuple[Path, Any]:
    """Writes a folder with config.json and weights, and returns it with the model of transformers."""
    family, values = CASES[case]
    torch.manual_seed(len(case) + len(kind))
    config_class = "Gemma3TextConfig" if family == "Gemma3Text" else f"{family}Config"
    config = getattr(transformers, config_class)(**values)
    if kind != "Model":
        config.num_labels = 3
    model = getattr(transformers, f"{family}{kind}")(config)
    randomized(model)
    model = model.to(getattr(torch, dtype)).eval()
    folder = Path(tempfile.mkdtemp(prefix="encoder-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    return folder, model.float()


def pipeline(folder: Path, **options: Any) -> EmbeddingsPipeline:
    """Returns the pipeline of a folder without a tokenizer."""
    config = PipelineConfig(model_path=str(folder), **options)
    config.resolve()
    architecture = PIPELINE_REGISTRY.architecture_of(config)
    assert architecture.task is PipelineTask.EMBEDDINGS_GENERATION
    tokenizer: Any = None
    model, adapters = architecture.pipeline_model, architecture.weight_adapters
    return EmbeddingsPipeline(config, model, -1, adapters, tokenizer)


def texts(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    """Returns random tokens without the padding token."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, length) for length in lengths]


def run(pipe: EmbeddingsPipeline, tokens: list[np.ndarray], types: Any = None) -> list[np.ndarray]:
    """Returns the results of texts, in order."""
    contexts = [
        TextEmbeddingContext(text, None if types is None else types[i])
        for i, text in enumerate(tokens)
    ]
    batch = {context.request_id: context for context in contexts}
    outputs = pipe.execute(EmbeddingsGenerationInputs([batch]))
    return [outputs[context.request_id].embeddings for context in contexts]


def reference(model: Any, tokens: np.ndarray, **inputs: Any) -> Any:
    """Returns transformers' outputs for one text."""
    with torch.no_grad():
        return model(torch.tensor(tokens)[None], **inputs)
