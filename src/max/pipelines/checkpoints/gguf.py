"""The config in a GGUF file's metadata, in the form of the Hugging Face layout.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.graph.weights import GGUFFile
from max.pipelines.core.exceptions import ModelFilesError

__all__ = ["config_of"]

ARCHITECTURES = {"llama": ("LlamaForCausalLM", "llama")}
"""For each GGUF name of an architecture, the Hugging Face class and model type."""

_REQUIRED = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_OPTIONAL = {"num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length"}

_FOLDER = "Give the model's folder in the Hugging Face layout with --model, and the file with --weight-path."


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The object of a config.json.

    Args:
        file: The file.

    Raises:
        ModelFilesError: The metadata lacks a key, or the architecture is not supported.
    """
    values = file.metadata
    name = str(values.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise ModelFilesError(
            f"{file.path}: the architecture {name!r} of GGUF files is not supported; there is "
            f"{', '.join(ARCHITECTURES)}",
            _FOLDER,
        )
    missing = [key for key in _REQUIRED.values() if f"{name}.{key}" not in values]
    if missing:
        raise ModelFilesError(f"{file.path}: the metadata lacks {', '.join(missing)}", _FOLDER)
    class_name, model_type = ARCHITECTURES[name]
    config: dict[str, Any] = {"architectures": [class_name], "model_type": model_type}
    for key, stored in {**_REQUIRED, **_OPTIONAL}.items():
        if f"{name}.{stored}" in values:
            config[key] = _number(file, f"{name}.{stored}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFilesError(f"{file.path} has no token_embd.weight", _FOLDER)
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    config["rope_parameters"] = _rope(file, name, config["max_position_embeddings"])
    return {**config, **_token_ids(values)}


def _number(file: GGUFFile, key: str) -> float:
    """A number of the metadata; llama.cpp also has lists, for models whose layers differ."""
    value = file.metadata[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelFilesError(f"{file.path}: {key} is {value!r}, expected a number over 0", _FOLDER)
    return value


def _rope(file: GGUFFile, name: str, longest: int) -> dict[str, Any]:
    values = file.metadata
    base = f"{name}.rope.freq_base"
    rope: dict[str, Any] = {"rope_theta": _number(file, base) if base in values else 10000.0}
    kind = values.get(f"{name}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        factors = file.read(file.tensors["rope_freqs.weight"])
        return {**rope, "rope_type": "factors", "factors": [float(f) for f in factors]}
    if kind == "none":
        return {**rope, "rope_type": "default"}
    rope |= {"rope_type": kind, "factor": values.get(f"{name}.rope.scaling.factor")}
    original = values.get(f"{name}.rope.scaling.original_context_length", longest)
    return {**rope, "original_max_position_embeddings": original}


def _token_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {key: f"tokenizer.ggml.{name}_token_id" for key, name in names.items()}
    ids: dict[str, Any] = {
        key: value for key, stored in keys.items() if isinstance(value := values.get(stored), int)
    }
    others = (values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
    ends = {number for number in others if isinstance(number, int)}
    if ends and "eos_token_id" in ids:
        return {**ids, "eos_token_id": sorted({ids["eos_token_id"], *ends})}
    return ids
