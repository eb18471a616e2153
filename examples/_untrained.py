"""An untrained encoder for the examples that need one: its vectors tell texts apart by their words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers


def write_encoder(folder: Path, texts: list[str]) -> None:
    """Writes a small BERT with random rows for words, and blocks that add little.

    Args:
        folder: Where the checkpoint goes.
        texts: The texts whose words it knows.
    """
    words = sorted({word.strip(".,").lower() for text in texts for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["?", *words])}, "?"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    size, inner = 64, 128
    config = {"hidden_size": size, "intermediate_size": inner, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "vocab_size": len(words) + 1, "hidden_act": "gelu"}
    config |= {"max_position_embeddings": 64, "type_vocab_size": 1, "architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"intermediate.dense": (inner, size), "output.dense": (size, inner)}
    shapes |= {f"attention.self.{part}": (size, size) for part in ("query", "key", "value")}
    shapes |= {"attention.output.dense": (size, size)}
    rng = np.random.default_rng(0)
    weights = {"embeddings.word_embeddings.weight": rng.standard_normal((len(words) + 1, size))}
    for table, rows in (("position", 64), ("token_type", 1)):
        weights[f"embeddings.{table}_embeddings.weight"] = np.zeros((rows, size))
    for name, shape in shapes.items():
        weights[f"encoder.layer.0.{name}.weight"] = rng.standard_normal(shape) * 0.01
        weights[f"encoder.layer.0.{name}.bias"] = np.zeros(shape[0])
    for part in ("attention.output.", "output."):
        weights[f"encoder.layer.0.{part}LayerNorm.weight"] = np.ones(size)
        weights[f"encoder.layer.0.{part}LayerNorm.bias"] = np.zeros(size)
    weights["embeddings.LayerNorm.weight"] = np.ones(size)
    weights["embeddings.LayerNorm.bias"] = np.zeros(size)
    save_file({k: v.astype(np.float32) for k, v in weights.items()}, folder / "model.safetensors")
