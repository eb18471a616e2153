"""GGUF files of transformers' models: named by the `gguf` package, with llama.cpp's conversions."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from max.pipelines.models.blocks.rope import RopeConfig

Array = npt.NDArray[Any]

PERMUTED = {"llama", "olmo", "granite", "granitemoe", "smollm3", "arcee", "mistral3"}
"""Architectures whose rows of queries and keys are stored with the elements of a rotated pair side by side."""

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def _neighbors(rows: Array, heads: int) -> Array:
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
            return _neighbors(value, heads)
        if "k_proj" in name:
            return _neighbors(value, config.num_key_value_heads)
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


def _experts(state: dict[str, Array], config: Any) -> dict[str, Array]:
    """Fused weights of experts and shared MLPs as llama.cpp's converter splits them, under names that `gguf` knows."""
    oss = config.model_type == "gpt_oss"
    result: dict[str, Array] = {}
    for name, value in state.items():
        name = name.replace("block_sparse_moe.experts", "mlp.experts")
        stem = name.rpartition(".")[0]
        if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
            part = "bias" if name.endswith("bias") else "weight"
            if oss and part == "weight":
                value = value.swapaxes(1, 2)
            half = value.shape[1] // 2
            halves = (value[:, ::2], value[:, 1::2]) if oss else (value[:, :half], value[:, half:])
            for own, array in zip(("gate", "up"), halves, strict=True):
                result[f"{stem}.{own}_proj.{part}"] = array
        elif name.endswith("experts.down_proj"):
            result[f"{name}.weight"] = value.swapaxes(1, 2) if oss else value
        elif name.endswith("experts.down_proj_bias"):
            result[f"{stem}.down_proj.bias"] = value
        elif name.endswith("shared_mlp.input_linear.weight"):
            layer = name.partition(".shared_mlp")[0]
            half = len(value) // 2
            result[f"{layer}.mlp.shared_expert.gate_proj.weight"] = value[:half]
            result[f"{layer}.mlp.shared_expert.up_proj.weight"] = value[half:]
        elif name.endswith("e_score_correction_bias"):
            layer = name.partition(".mlp.")[0]
            result[f"{layer}.mlp.gate.e_score_correction.bias"] = value.reshape(-1)
        elif name.endswith(".router.weight") and "block_sparse_moe" in name:
            result[f"{stem}.layer.weight"] = value
        elif name.endswith((".sinks", ".layer_scalar")):
            result[f"{name}.weight"] = value
        else:
            result[name] = value
    return {name: np.ascontiguousarray(value) for name, value in result.items()}


def split_latents(state: dict[str, Array], config: Any) -> dict[str, Array]:
    """DeepSeek's `kv_b_proj` as llama.cpp's converter splits it: keys by latents of each head, and values."""
    result: dict[str, Array] = {}
    for name, value in state.items():
        stem, found, _ = name.partition("kv_b_proj")
        if not found:
            result[name] = value
            continue
        sizes = config.qk_nope_head_dim, config.v_head_dim
        heads = value.reshape(config.num_attention_heads, sum(sizes), config.kv_lora_rank)
        result[f"{stem}k_b_proj.weight"] = heads[:, : sizes[0]].swapaxes(1, 2)
        result[f"{stem}v_b_proj.weight"] = heads[:, sizes[0] :]
    return {name: np.ascontiguousarray(value) for name, value in result.items()}


def _add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    """The metadata of experts that llama.cpp's converters write."""

    def first(*names: str) -> Any:
        return next((v for n in names if (v := getattr(config, n, None)) is not None), None)

    count = first("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
    if count is None:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(first("moe_topk", "moe_k", "num_experts_per_tok"))
    pairs = {
        writer.add_expert_feed_forward_length: first("moe_intermediate_size"),
        writer.add_expert_shared_feed_forward_length: first(
            "shared_expert_intermediate_size", "shared_intermediate_size"
        ),
        writer.add_expert_shared_count: first("n_shared_experts", "moe_num_shared_experts"),
        writer.add_expert_group_count: first("n_group"),
        writer.add_expert_group_used_count: first("topk_group"),
        writer.add_leading_dense_block_count: first(
            "first_k_dense_replace", "moe_layer_start_index"
        ),
        writer.add_interleave_moe_layer_step: first("moe_layer_interval"),
        writer.add_expert_weights_scale: first("routed_scaling_factor"),
        writer.add_expert_weights_norm: first("norm_topk_prob"),
    }
    for add, value in pairs.items():
        if value is not None:
            add(value)


def writer_of(
    model: Any, arch: str, extra: Callable[[gguf.GGUFWriter], None], path: Path = Path("unused")
) -> tuple[gguf.GGUFWriter, Any]:
    """A writer with a model's metadata, and the model's config; see `write`."""
    config = copy.deepcopy(model.config)
    config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    inner = next(
        (v for k in ("intermediate_size", "n_inner", "ffn_hidden_size") if (v := getattr(config, k, None))),
        4 * config.hidden_size,
    )  # fmt: skip
    kinds_of_layers = config.model_type == "gemma4_text"
    if not kinds_of_layers:
        writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    kv = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    if arch == "falcon" and config.multi_query and not config.new_decoder_architecture:
        kv = 1
    if not kinds_of_layers:
        writer.add_head_count_kv(kv or config.num_attention_heads)
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "seq_length", 64)
    writer.add_context_length(getattr(config, "max_seq_len", longest))
    if (eps := getattr(config, "rms_norm_eps", None)) is not None:
        writer.add_layer_norm_rms_eps(eps)
    for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if (eps := getattr(config, key, None)) is not None:
            writer.add_layer_norm_eps(eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and not kinds_of_layers:
        writer.add_key_length(head_dim)
    rope = getattr(config, "rope_parameters", None)
    if rope:
        rope = rope.get("full_attention", rope)
        size = head_dim or config.hidden_size // config.num_attention_heads
        # llama.cpp's converter writes Hunyuan's scaled base
        growth = (rope.get("alpha") or 1.0) ** (size / (size - 2))
        writer.add_rope_freq_base(rope["rope_theta"] * growth)
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
            }).longrope_magnitude()  # fmt: skip
            writer.add_rope_scaling_attn_factors(magnitude)
    if sliding := getattr(config, "sliding_window", None):
        writer.add_sliding_window(sliding)
    _add_experts(writer, config)
    extra(writer)
    return writer, config


def write(
    path: Path,
    model: Any,
    arch: str,
    extra: Callable[[gguf.GGUFWriter], None],
    change: Callable[[dict[str, Array], Any], dict[str, Array]] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> dict[str, Array]:
    """Writes a float32 file.

    Args:
        path: The file.
        model: A model of transformers.
        arch: llama.cpp's name of its architecture.
        extra: Writes metadata that the family has besides the sizes.
        change: Changes the weights, by names of transformers, before they are written.
        kinds: The types of quantized tensors, by the part of their names in a layer.

    Returns:
        The values of the quantized tensors, by their names in the file.
    """
    writer, config = writer_of(model, arch, extra, path)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    state = {n: np.ascontiguousarray(v.numpy()) for n, v in model.state_dict().items()}
    state = _experts(_stacked(state), config)
    decoded: dict[str, Array] = {}
    for name, value in (change(state, config) if change else state).items():
        if tied and name == "lm_head.weight":
            continue
        stems = name, name.removeprefix("transformer.")
        own = next((n for s in stems if (n := names.get_name(s, (".weight", ".bias")))), None)
        assert own is not None, name
        value = _converted(name, value, arch, config)
        kind = (
            (kinds or {}).get(own.split(".")[2])
            if own.endswith(".weight") and own.startswith("blk.")
            else None
        )
        if kind is None:
            writer.add_tensor(own, value)
            continue
        number = gguf.GGMLQuantizationType[kind]
        blocks = gguf.quants.quantize(value, number)
        decoded[own] = gguf.quants.dequantize(blocks, number)
        writer.add_tensor(own, blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded
