"""Search by meaning of words: vectors of texts from an encoder, and the texts that are nearest to a query.

Without an argument it runs an untrained BERT, whose vectors tell texts apart by their words; give it the folder of an
embedding model such as all-MiniLM-L6-v2 instead.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from max.pipelines import PipelineConfig
from max.pipelines.encoders.text_encoder import TextEncoder

TEXTS = [
    "The cat sleeps on the warm roof.",
    "A train to the north leaves at noon.",
    "Bread is baked from flour, water and salt.",
    "The north wind is cold.",
]


def untrained(folder: Path) -> None:
    """Writes a small BERT with random rows for words, and blocks that add little."""
    words = sorted({word.strip(".,").lower() for text in TEXTS for word in text.split()})
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


def search(folder: str) -> None:
    """Prints the vectors' shape, and the nearest text of each query."""
    encoder = TextEncoder(PipelineConfig(model_path=folder))
    vectors = encoder.encode(TEXTS)
    print(f"{len(vectors)} vectors of {len(vectors[0])} numbers")
    for query in ("a cold wind", "flour and water", "the train"):
        scores = encoder.rank(query, TEXTS)
        print(f"{query}: {TEXTS[int(scores.argmax())]}")


if len(sys.argv) > 1:
    search(sys.argv[1])
else:
    with tempfile.TemporaryDirectory() as made:
        untrained(Path(made))
        search(made)

# prints: 4 vectors of 64 numbers
# prints: a cold wind: The north wind is cold.
# prints: flour and water: Bread is baked from flour, water and salt.
# prints: the train: A train to the north leaves at noon.
