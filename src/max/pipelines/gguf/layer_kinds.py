"""GGUF files with two kinds of layers: which layers have a window, and the per-layer values of Gemma 3n and 4."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from max.graph.weights import GGUFFile
from max.pipelines.core.exceptions import ModelFilesError

__all__ = ["BY_LAYER", "layer_kinds_of", "layer_types_of", "several_states_of"]

BY_LAYER = {
    "gemma3n": ("feed_forward_length",),
    "gemma4": ("feed_forward_length", "attention.head_count_kv", "attention.key_length"),
}
"""Metadata keys with a value per layer, by architecture; `several_states_of` and `layer_kinds_of` read them."""

_FOLDER = "Give the model's folder in the Hugging Face layout with --model, and the file with --weight-path."


def layer_types_of(file: GGUFFile, name: str, count: int) -> dict[str, Any]:
    """The keys of config.json that state which layers have a window, if the file states it.

    Args:
        file: The file.
        name: The architecture in the file.
        count: The number of layers.

    Raises:
        ModelFilesError: The file has a list of another length.
    """
    key = f"{name}.attention.sliding_window_pattern"
    pattern = file.metadata.get(key)
    if pattern is None:
        return {}
    if type(pattern) is int and pattern > 0:
        return {"sliding_window_pattern": pattern}
    if not isinstance(pattern, np.ndarray) or len(pattern) != count:
        raise _error(file, key, pattern, f"a period, or {count} flags")
    types = [f"{'sliding' if local else 'full'}_attention" for local in pattern.tolist()]
    return {"layer_types": types, "use_sliding_window": True}


def layer_kinds_of(file: GGUFFile, name: str, rope: dict[str, Any]) -> dict[str, Any]:
    """The keys of Gemma 4's config.json that depend on the kinds of layers.

    Args:
        file: The file.
        name: The architecture in the file.
        rope: The rotation of layers without a window.

    Raises:
        ModelFilesError: A value is missing or does not fit.
    """
    values, read = file.metadata, _Values(file, name)
    count, integer = read.integer("block_count"), read.integer
    windowed = [bool(value) for value in read.by_layer("attention.sliding_window_pattern")]
    shared = integer("attention.shared_kv_layers", 0)
    heads, sizes = read.by_layer("attention.head_count_kv"), read.by_layer("feed_forward_length")
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
    if own < 1:
        raise _error(file, f"{name}.attention.shared_kv_layers", shared, f"fewer than {count}")
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
        # layers without a value projection use their keys as values
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in file.tensors for index in full),
        "enable_moe_block": integer("expert_count", 0) > 0,
        "hidden_size_per_layer_input": integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": rows.shape[0] if rows and rows.shape else 1,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def several_states_of(file: GGUFFile, name: str, rope: dict[str, Any]) -> dict[str, Any]:
    """The keys that only Gemma 3n's config.json has.

    Args:
        file: The file.
        name: The architecture in the file.
        rope: The rotation of layers without a window.

    Raises:
        ModelFilesError: A value is missing or does not fit.
    """
    values, read = file.metadata, _Values(file, name)
    key = f"{name}.activation_sparsity_scale"
    bounds: Any = values.get(key)
    count = read.integer("block_count")
    # minus infinity keeps all activations of the layer
    if bounds is not None and not (
        isinstance(bounds, np.ndarray) and len(bounds) == count and (bounds < np.inf).all()
    ):
        raise _error(file, key, bounds, f"{count} numbers")
    parts = {
        part: file.tensors.get(part)
        for part in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight")
    }
    missing = next((part for part, tensor in parts.items() if not tensor or not tensor.shape), None)
    if missing is not None:
        raise ModelFilesError(f"{file.path} has no {missing}", _FOLDER)
    table, residual = (tensor.shape[0] for tensor in parts.values() if tensor is not None)
    theta = values.get(f"{name}.rope.freq_base_swa", 10000.0)
    shares = [] if bounds is None else [NormalDist().cdf(float(bound)) for bound in bounds]
    return {
        "intermediate_size": read.by_layer("feed_forward_length"),
        "activation_sparsity_pattern": shares or None,
        "num_kv_shared_layers": read.integer("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": read.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table,
        "laurel_rank": residual,
        "altup_active_idx": read.integer("altup.active_idx", 0),
        "altup_num_inputs": read.integer("altup.num_inputs", 4),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


class _Values:
    """Integers in the metadata of an architecture.

    Args:
        file: The file.
        name: The architecture in the file.
    """

    def __init__(self, file: GGUFFile, name: str) -> None:
        self.file, self.name = file, name

    def integer(self, key: str, *default: int) -> int:
        """A non-negative integer.

        Raises:
            ModelFilesError: The key is missing and there is no default, or the value is not such an integer.
        """
        value = self.file.metadata.get(f"{self.name}.{key}", *default)
        if type(value) is not int or value < 0:
            raise _error(self.file, f"{self.name}.{key}", value, "an integer from 0")
        return value

    def by_layer(self, key: str) -> list[Any]:
        """A value per layer; a single integer applies to all layers.

        Raises:
            ModelFilesError: The list has another length.
        """
        count = self.integer("block_count")
        if count < 1:
            raise _error(self.file, f"{self.name}.block_count", count, "1 or more")
        value = self.file.metadata.get(f"{self.name}.{key}")
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list) and len(value) == count:
            if not all(type(flag) in (int, bool) and flag >= 0 for flag in value):
                raise _error(self.file, f"{self.name}.{key}", value, f"{count} integers from 0")
            return value
        if type(value) is not int or value < 0:
            raise _error(self.file, f"{self.name}.{key}", value, f"an integer, or {count}")
        return [value] * count


def _error(file: GGUFFile, key: str, value: object, expected: str) -> ModelFilesError:
    return ModelFilesError(f"{file.path}: {key} is {value!r}, expected {expected}", _FOLDER)
