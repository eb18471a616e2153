"""GGUF files of transformers' models: named by the `gguf` package, with llama.cpp's conversions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from max.pipelines.models.rope import RopeConfig

Array = npt.NDArray[Any]

PERMUTED = {"llama", "olmo", "granite", "smollm3", "arcee"}
"""Architectures whose rows of queries and keys are stored with the elements of a rotated pair side by side."""

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def _neighbours(rows: Array, heads: int) -> Array:
    """Rows of heads whose pairs are half a head apart, with pairs side by side."""
    size = rows.shape[0] // heads
    parts = rows.reshape(heads, 2, size // 2, *rows.shape[1:])
    return parts.swapaxes(1, 2).reshape(rows.shape)


def _split_heads(rows: Array, kv_heads: int, group: int) -> Array:
    """Rows of a fused projection by KV heads as all queries, all keys, all values."""
    size = rows.shape[0] // (kv_heads * (group + 2))
    parts = rows.reshape(kv_heads, group + 2, size, *rows.shape[1:])
    three = parts[:, :group], parts[:, group], parts[:, group + 1]
    return np.concatenate([p.reshape(-1, *rows.shape[1:]) for p in three])


def _converted(name: str, value: Array, arch: str, config: Any) -> Array:
    """A weight of transformers as llama.cpp's converter stores it."""
    if arch == "gpt2" and name.endswith(TRANSPOSED):
        return np.ascontiguousarray(value.T)
    if arch in ("gemma", "gemma2", "gemma3") and "norm" in name:
        return value + 1
    if arch == "nemotron" and "norm" in name and name.endswith("weight"):
        return value + 1
    heads = config.num_attention_heads
    if arch in PERMUTED:
        if "q_proj" in name:
            return _neighbours(value, heads)
        if "k_proj" in name:
            return _neighbours(value, config.num_key_value_heads)
    if "query_key_value" in name:
        if arch in ("bloom", "gptneox"):
            return _split_heads(value, heads, 1)
        if arch == "falcon":
            kv = config.num_kv_heads if config.new_decoder_architecture else 1
            return _split_heads(value, kv, heads // kv)
    return value


def _stacked(state: dict[str, Array]) -> dict[str, Array]:
    """StableLM's norms of heads, stacked."""
    result: dict[str, Array] = {}
    for name, value in state.items():
        found = re.fullmatch(r"(.*layernorm)\.norms\.(\d+)\.(weight)", name)
        if found is None:
            result[name] = value
        else:
            key = f"{found[1]}.{found[3]}"
            result[key] = np.concatenate([*([result[key]] if key in result else []), value[None]])
    return result


def write(path: Path, model: Any, arch: str, extra: Callable[[gguf.GGUFWriter], None]) -> None:
    """Writes a float32 file.

    Args:
        path: The file.
        model: A model of transformers.
        arch: llama.cpp's name of its architecture.
        extra: Writes metadata that the family has besides the sizes.
    """
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    inner = next(
        (v for k in ("intermediate_size", "n_inner", "ffn_hidden_size") if (v := getattr(config, k, None))),
        4 * config.hidden_size,
    )  # fmt: skip
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    kv = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    if getattr(config, "multi_query", False) and not config.new_decoder_architecture:
        kv = 1
    writer.add_head_count_kv(kv or config.num_attention_heads)
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "seq_length", 64)
    writer.add_context_length(getattr(config, "max_seq_len", longest))
    if (eps := getattr(config, "rms_norm_eps", None)) is not None:
        writer.add_layer_norm_rms_eps(eps)
    for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if (eps := getattr(config, key, None)) is not None:
            writer.add_layer_norm_eps(eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
    rope = getattr(config, "rope_parameters", None)
    if rope:
        rope = rope.get("full_attention", rope)
        size = head_dim or config.hidden_size // config.num_attention_heads
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
        if rope["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] in ("yarn", "longrope"):
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope["rope_type"] == "longrope":
            for part in ("short", "long"):
                values = np.array(rope[f"{part}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{part}.weight", values)
            magnitude = RopeConfig("longrope", 1.0, {
                **rope, "max_position_embeddings": config.max_position_embeddings
            })._longrope_magnitude()  # fmt: skip
            writer.add_rope_scaling_attn_factors(magnitude)
    if (sliding := getattr(config, "sliding_window", None)) is not None:
        writer.add_sliding_window(sliding)
    extra(writer)
    tied = config.tie_word_embeddings
    state = {n: np.ascontiguousarray(v.numpy()) for n, v in model.state_dict().items()}
    for name, value in _stacked(state).items():
        if tied and name == "lm_head.weight":
            continue
        stems = name, name.removeprefix("transformer.")
        own = next((n for s in stems if (n := names.get_name(s, (".weight", ".bias")))), None)
        assert own is not None, name
        writer.add_tensor(own, _converted(name, value, arch, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
