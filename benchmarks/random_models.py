"""Models of random weights for start-up measurements: written by NumPy, in seconds, without torch.

The values of a weight repeat every `PERIOD` elements: loading, packing and compiling do not depend on them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.models import CLASSES, SHAPES, TOKENIZER_FROM
from benchmarks.random_gguf import write_random_gguf

PERIOD = (1 << 20) + 7

# Llama-3.2-1B's layers with the vocabulary of SmolLM2
STARTUP_SHAPES: dict[str, dict[str, Any]] = {
    "llama-135m": SHAPES["llama-135m"],
    "llama-1.07b": {**SHAPES["llama-1.2b"], "vocab_size": 49152},
    "llama-tiny": SHAPES["llama-tiny"],
    # Llama-3.1-8B's shape
    "llama-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
    },
    "qwen3-0.6b": SHAPES["qwen3-0.6b"],
    "llama-28m": {
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 8192,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    # each of its tokens has a text in the tokenizer, so that streams send each of them
    "llama-26m": {
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
}
STORED = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights of a Llama checkpoint, by name; with ``head_dim``, as Qwen 3 has it, norms of heads too."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim", hidden // config["num_attention_heads"])
    width, kv_width = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, width),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if "head_dim" in config:
        layer |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {**shapes, "model.norm.weight": (hidden,)}


def random_checkpoint(shape: str, dtype: str, folder: Path) -> Path:
    """Writes a checkpoint in the Hugging Face layout; gives its folder.

    Args:
        shape: A key of `STARTUP_SHAPES`.
        dtype: A key of `STORED`.
        folder: Where the checkpoint's folder is made.
    """
    target = folder / f"{shape}-{dtype}"
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    _, model_class, family = CLASSES[shape.partition("-")[0]]
    config: dict[str, Any] = {
        "architectures": [model_class],
        "model_type": family,
        "dtype": dtype,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "eos_token_id": None,
        **STARTUP_SHAPES[shape],
    }
    values = np.random.default_rng(0).standard_normal(PERIOD, np.float32) * np.float32(0.02)
    values = values.astype(STORED[dtype])
    weights = {
        name: np.ones(of, values.dtype) if len(of) == 1 else np.resize(values, of)
        for name, of in weight_shapes(config).items()
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER_FROM / name, target / name)
    (target / "config.json").write_text(json.dumps(config))
    return target


def random_gguf(shape: str, encoding: str, folder: Path) -> Path:
    """Writes a GGUF file with a vocabulary; gives its path.

    Args:
        shape: A key of `STARTUP_SHAPES`.
        encoding: The encoding of matrices, as in `write_random_gguf`.
        folder: Where the file is made.
    """
    target = folder / f"{shape}-{encoding.lower()}.gguf"
    if not target.exists():
        config = STARTUP_SHAPES[shape]
        write_random_gguf(target, config, weight_shapes(config), encoding)
    return target
