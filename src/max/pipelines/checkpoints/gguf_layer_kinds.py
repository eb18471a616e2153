"""Layers of two kinds in GGUF files (Gemma 4): values by layer in the metadata, and what tensors tell."""

from __future__ import annotations

from typing import Any

import numpy as np

from max.graph.weights import GGUFFile
from max.pipelines.core.exceptions import ModelFilesError

__all__ = ["BY_LAYER", "layer_kinds_of"]

BY_LAYER = ("feed_forward_length", "attention.head_count_kv", "attention.key_length")
"""Keys of the metadata that `layer_kinds_of` reads."""

_FOLDER = "Give the model's folder in the Hugging Face layout with --model, and the file with --weight-path."


def layer_kinds_of(file: GGUFFile, name: str, rope: dict[str, Any]) -> dict[str, Any]:
    """The keys of a Gemma 4's config.json that its layers' kinds decide.

    Args:
        file: The file.
        name: The architecture in the file.
        rope: The rotation of layers without a window.

    Raises:
        ModelFilesError: A value is missing or does not fit, or layers have experts.
    """
    values = file.metadata
    if values.get(f"{name}.expert_count"):
        raise ModelFilesError(f"{file.path}: experts of {name} files are not read", _FOLDER)

    def integer(key: str, *default: int) -> int:
        value = values.get(f"{name}.{key}", *default)
        if type(value) is not int or value < 0:
            raise _error(file, f"{name}.{key}", value, "an integer from 0")
        return value

    count = integer("block_count")

    def by_layer(key: str) -> list[Any]:
        value = values.get(f"{name}.{key}")
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list) and len(value) == count:
            return value
        if type(value) is not int:
            raise _error(file, f"{name}.{key}", value, f"an integer, or {count}")
        return [value] * count

    windowed = [bool(value) for value in by_layer("attention.sliding_window_pattern")]
    shared = integer("attention.shared_kv_layers", 0)
    heads, sizes = by_layer("attention.head_count_kv"), by_layer("feed_forward_length")
    of_kind: dict[bool, int] = {}
    for index, (local, number) in enumerate(zip(windowed, heads, strict=True)):
        if of_kind.setdefault(local, number) != number:
            raise _error(
                file,
                f"{name}.attention.head_count_kv",
                heads,
                f"{of_kind[local]} for layer {index}",
            )
    inner, wide = sizes[0], sizes[0] != sizes[-1]
    own = count - shared
    expected = [inner] * own + [2 * inner if wide else inner] * shared
    if sizes != expected:
        raise _error(file, f"{name}.feed_forward_length", sizes, str(expected))
    full = [index for index in range(own) if not windowed[index]]
    rows = file.tensors.get("per_layer_token_embd.weight")
    theta = values.get(f"{name}.rope.freq_base_swa", 10000.0)
    return {
        "intermediate_size": inner,
        "use_double_wide_mlp": wide,
        "layer_types": [f"{'sliding' if local else 'full'}_attention" for local in windowed],
        "num_kv_shared_layers": shared,
        "num_key_value_heads": of_kind.get(True, of_kind.get(False)),
        "num_global_key_value_heads": of_kind.get(False),
        "head_dim": integer("attention.key_length_swa", integer("attention.key_length")),
        "global_head_dim": integer("attention.key_length"),
        # the values of layers without a projection of their own are the keys
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in file.tensors for index in full),
        "hidden_size_per_layer_input": integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": 1 if rows is None else rows.shape[0],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _error(file: GGUFFile, key: str, value: Any, expected: str) -> ModelFilesError:
    return ModelFilesError(f"{file.path}: {key} is {value!r}, expected {expected}", _FOLDER)
