"""The config in a GGUF file's metadata, converted to the keys of a Hugging Face config.json.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from max.graph.weights import GGUFFile
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.families import FAMILIES, family_of
from max.pipelines.gguf.latents import latents_of
from max.pipelines.gguf.layer_kinds import (
    BY_LAYER,
    layer_kinds_of,
    layer_types_of,
    several_states_of,
)
from max.pipelines.gguf.recurrent import RECURRENT, dense_layers, recurrent_keys

__all__ = ["config_of"]

_REQUIRED = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_EPSILONS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
_OPTIONAL = {
    **_EPSILONS,
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "clip_qkv": "attention.clamp_kqv",
    "rope_local_base_freq": "rope.freq_base_swa",
}
_BY_LAYER_OF_HYBRIDS = frozenset(
    {
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.sliding_window",
    }
)
"""Keys that may be 0 or a list by layer, in files of models with recurrent layers."""
_COUNTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "moe_latent_size": "moe_latent_size",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "routed_scaling_factor": "expert_weights_scale",
}
"""The keys of the numbers of experts and the sizes of latents; a file may state 0."""
_BY_TENSOR = {
    "output_bias": ("output.bias",),
    "attention_bias": ("blk.*.attn_q.bias", "blk.*.attn_qkv.bias"),
    "attention_output_bias": ("blk.*.attn_output.bias",),
    "mlp_bias": ("blk.*.ffn_down.bias",),
    "qk_norm": ("blk.*.attn_q_norm.weight",),
}
"""Flags of config.json, and the tensors whose presence in a file means true; in hybrid models layers differ."""

_MOST_LAYERS = 4096
"""An upper bound of the number of layers, which limits the time and memory of building a config."""
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")

_FOLDER = "Give the model's folder in the Hugging Face layout with --model, and the file with --weight-path."


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Converts the metadata to the object of a config.json.

    Args:
        file: The file.

    Raises:
        ModelFilesError: The metadata lacks a key, or the architecture is not supported.
    """
    values = file.metadata
    name = str(values.get("general.architecture"))
    family = family_of(name, values)
    if family is None:
        raise ModelFilesError(
            f"{file.path}: the architecture {name!r} of GGUF files is not supported; there is "
            f"{', '.join(FAMILIES)}",
            _FOLDER,
        )
    required = {**_REQUIRED, "intermediate_size": None} if name in RECURRENT else dict(_REQUIRED)
    missing = [key for key in required.values() if key and f"{name}.{key}" not in values]
    if not any(f"{name}.{key}" in values for key in _EPSILONS.values()) and name != "olmo":
        missing.append(" or ".join(_EPSILONS.values()))
    if missing:
        raise ModelFilesError(f"{file.path}: the metadata lacks {', '.join(missing)}", _FOLDER)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFilesError(f"{file.path} has no token_embd.weight", _FOLDER)
    if len(embedding.shape) != 2:
        raise ModelFilesError(
            f"{file.path}: token_embd.weight has the shape {list(embedding.shape)}, expected two sizes",
            _FOLDER,
        )
    config: dict[str, Any] = {
        key: _greatest(file, f"{name}.{stored}")
        if name in RECURRENT and stored in _BY_LAYER_OF_HYBRIDS
        else _number(file, f"{name}.{stored}")
        for key, stored in {**_REQUIRED, **_OPTIONAL}.items()
        if f"{name}.{stored}" in values and stored not in BY_LAYER.get(name, ())
    }
    config |= _counts(file, name)
    config["num_hidden_layers"] = _layers(file, name, config)
    layers = range(config["num_hidden_layers"])
    config |= layer_types_of(file, name, len(layers))
    flags = {
        key: any(t.replace("*", str(i)) in file.tensors for t in tensors for i in layers)
        for key, tensors in _BY_TENSOR.items()
    }
    size = config.get("head_dim") or config["hidden_size"] / max(config["num_attention_heads"], 1)
    special = _special(file, name, config, size)
    rope = _rope(file, name, config["max_position_embeddings"])
    config |= {
        **flags,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **special,
        "rope_parameters": {**rope, **special.get("rope_parameters", {})},
    }
    if f"{name}.rope.dimension_count" in values and "qk_rope_head_dim" not in config:
        config["partial_rotary_factor"] = _number(file, f"{name}.rope.dimension_count") / size
    renamed = {family.keys.get(key, key): value for key, value in config.items()}
    return {
        "architectures": [family.name],
        "model_type": family.model_type,
        "from_gguf": True,
        **renamed,
        **family.constants,
        **_token_ids(values),
    }


def _special(
    file: GGUFFile, name: str, config: Mapping[str, Any], head_dim: float
) -> dict[str, Any]:
    """The keys that only files of one family state, or state differently, or omit."""
    if name in ("gemma2", "gemma3"):
        # files lack the key; the 27B models, recognised by their number of layers, use `hidden / heads`
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        is_largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[name]
        return {"query_pre_attn_scalar": hidden / heads if is_largest else head_dim}
    if name == "llama4":
        # as in llama.cpp: Maverick has 128 experts and no QK norm, Scout has QK norm
        return {"use_qk_norm": config.get("num_experts") != 128}
    if name == "exaone4" and "sliding_window" not in config:
        # the default of the config class is a window
        return {
            "sliding_window": None,
            "layer_types": ["full_attention"] * config["num_hidden_layers"],
        }
    if name == "gemma3n":
        rope = _rope(file, name, config["max_position_embeddings"])
        return several_states_of(file, name, rope)
    if name == "gemma4":
        rope = _rope(file, name, config["max_position_embeddings"])
        return layer_kinds_of(file, name, rope)
    if name == "olmo2" and "sliding_window" in config:
        rope = _rope(file, name, config["max_position_embeddings"])
        local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    if name == "mistral3":
        return {"rope_parameters": _growth(file, name)}
    if name == "apertus":
        return {"xielu": {key: _listed(file, f"xielu.{key}", config) for key in _XIELU}}
    if name == "mpt":
        largest = _least(file, "mpt.attention.max_alibi_bias", 8.0)
        clip = config.get("clip_qkv")
        return {"attn_config": {"alibi": largest > 0, "alibi_bias_max": largest, "clip_qkv": clip}}
    if name == "deepseek2":
        return latents_of(file, config)
    if name in RECURRENT:
        return recurrent_keys(file, name, config)
    if name == "falcon":
        parallel = _flag(file, "falcon.use_parallel_residual", True)
        return {
            "num_ln_in_parallel_attn": 1 + ("blk.0.attn_norm_2.weight" in file.tensors),
            "new_decoder_architecture": parallel,
            "parallel_attn": parallel,
            "multi_query": config.get("num_key_value_heads") == 1,
            "alibi": _least(file, "falcon.attention.max_alibi_bias", 0.0) > 0,
        }
    if name in ("qwen2moe", "qwen3moe"):
        return {"mlp_only_layers": dense_layers(file, config["num_hidden_layers"])}
    if name in ("stablelm", "gptneox"):
        without = "blk.0.ffn_norm.weight" not in file.tensors
        return {"use_parallel_residual": _flag(file, f"{name}.use_parallel_residual", without)}
    return {}


def _growth(file: GGUFFile, name: str) -> dict[str, Any]:
    """Ministral 3: the growth of queries with the position, and YaRN's magnitude."""
    rope: dict[str, Any] = {}
    for key, stored in (
        ("llama_4_scaling_beta", "attention.temperature_scale"),
        ("mscale_all_dim", "rope.scaling.yarn_log_multiplier"),
    ):
        if _stated(file, f"{name}.{stored}"):
            rope[key] = _number(file, f"{name}.{stored}")
    # files state only the one that differs from 1
    return {**rope, "mscale": 1.0} if "mscale_all_dim" in rope else rope


def _listed(file: GGUFFile, key: str, config: Mapping[str, Any]) -> list[float]:
    """A number per layer; a single number applies to all layers."""
    value: Any = file.metadata.get(key)
    count = int(config["num_hidden_layers"])
    values: list[Any] = value.tolist() if isinstance(value, np.ndarray) else [value] * count
    if len(values) != count or not all(isinstance(number, float) for number in values):
        raise ModelFilesError(
            f"{file.path}: {key} is {value!r}, expected a number, or {count}", _FOLDER
        )
    return values


def _greatest(file: GGUFFile, key: str) -> float:
    """A non-negative number; of a list by layer, the largest."""
    value: Any = file.metadata[key]
    values: list[Any] = value.tolist() if isinstance(value, np.ndarray) and value.size else [value]
    if not all(type(number) in (int, float) and 0 <= number < math.inf for number in values):
        raise ModelFilesError(f"{file.path}: {key} is {value!r}, expected numbers from 0", _FOLDER)
    return max(values)


def _number(file: GGUFFile, key: str) -> float:
    """A positive number of the metadata; lists, which llama.cpp writes if layers differ, are refused."""
    value: Any = file.metadata.get(key)
    # the comparison is false for NaN too
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ModelFilesError(f"{file.path}: {key} is {value!r}, expected a number over 0", _FOLDER)
    return value


def _least(file: GGUFFile, key: str, default: float) -> float:
    """A non-negative number, or the default if the file does not state it."""
    return _greatest(file, key) if key in file.metadata else default


def _stated(file: GGUFFile, key: str) -> bool:
    """Whether the file states a value other than 0."""
    value: Any = file.metadata.get(key)
    return value is not None and not (type(value) in (int, float) and value == 0)


def _flag(file: GGUFFile, key: str, default: bool) -> bool:
    """A flag, or the default if the file does not state it."""
    value = file.metadata.get(key, default)
    if type(value) not in (bool, int):
        raise ModelFilesError(f"{file.path}: {key} is {value!r}, expected true or false", _FOLDER)
    return bool(value)


def _layers(file: GGUFFile, name: str, config: Mapping[str, Any]) -> int:
    """The number of layers, without those for multi-token prediction, which config.json does not count."""
    blocks, prediction_layers = (
        config["num_hidden_layers"],
        config.get("num_nextn_predict_layers", 0),
    )
    if type(blocks) is not int or blocks > _MOST_LAYERS:
        raise ModelFilesError(
            f"{file.path}: {name}.block_count is {blocks}, expected an integer from 1 to {_MOST_LAYERS}",
            _FOLDER,
        )
    if type(prediction_layers) is not int or prediction_layers >= blocks:
        raise ModelFilesError(
            f"{file.path}: {name}.nextn_predict_layers is {prediction_layers} of {blocks} blocks, expected fewer",
            _FOLDER,
        )
    return blocks - prediction_layers


def _vector(file: GGUFFile, tensor: str) -> list[float]:
    """The elements of a one-dimensional tensor of floats."""
    stored = file.tensors.get(tensor)
    shape = None if stored is None else list(stored.shape)
    if (
        stored is None
        or len(stored.shape) != 1
        or stored.stored not in ("F32", "F16", "BF16", "F64")
    ):
        raise ModelFilesError(
            f"{file.path}: {tensor} of shape {shape}, expected a list of floats", _FOLDER
        )
    return [float(x) for x in file.read(stored)]


def _counts(file: GGUFFile, name: str) -> dict[str, Any]:
    """The numbers of experts and latent sizes in the metadata, and whether the weights of experts are normalised."""
    counts: dict[str, Any] = {}
    for key, stored in _COUNTS.items():
        value = file.metadata.get(f"{name}.{stored}")
        if value is None:
            continue
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ModelFilesError(
                f"{file.path}: {name}.{stored} is {value!r}, expected a number from 0", _FOLDER
            )
        counts[key] = value
    key = f"{name}.expert_weights_norm"
    return {**counts, "norm_topk_prob": _flag(file, key, False)} if key in file.metadata else counts


def _rope(file: GGUFFile, name: str, longest: int) -> dict[str, Any]:
    """The rotation in the keys of config.json: base, scaling and the lengths that it depends on."""
    values = file.metadata
    base = f"{name}.rope.freq_base"
    rope: dict[str, Any] = {"rope_theta": _number(file, base) if base in values else 10000.0}
    kind = values.get(f"{name}.rope.scaling.type", "none")
    original = values.get(f"{name}.rope.scaling.original_context_length", longest)
    if "rope_factors_long.weight" in file.tensors:
        parts = {
            f"{part}_factor": _vector(file, f"rope_factors_{part}.weight")
            for part in ("short", "long")
        }
        magnitude = values.get(f"{name}.rope.scaling.attn_factor")
        return {
            **rope,
            **parts,
            "rope_type": "longrope",
            "attention_factor": magnitude,
            "original_max_position_embeddings": original,
        }
    if "rope_freqs.weight" in file.tensors:
        return {**rope, "rope_type": "factors", "factors": _vector(file, "rope_freqs.weight")}
    if not isinstance(kind, str):
        raise ModelFilesError(
            f"{file.path}: {name}.rope.scaling.type is {kind!r}, expected a name", _FOLDER
        )
    if kind == "none":
        return {**rope, "rope_type": "default"}
    rope |= {"rope_type": kind, "factor": values.get(f"{name}.rope.scaling.factor")}
    if kind == "yarn":
        rope |= _yarn(file, name)
    if name == "gpt-oss":
        rope["truncate"] = False
    return {**rope, "original_max_position_embeddings": original}


def _yarn(file: GGUFFile, name: str) -> dict[str, Any]:
    """The optional parameters of YaRN in the metadata."""
    rope: dict[str, Any] = {}
    for key in ("beta_fast", "beta_slow"):
        if _stated(file, stored := f"{name}.rope.scaling.yarn_{key}"):
            rope[key] = _number(file, stored)
    for key in ("attn_factor", "yarn_attn_factor"):
        if _stated(file, stored := f"{name}.rope.scaling.{key}"):
            # the file states the magnitude relative to the one that YaRN computes
            factor = max(_number(file, f"{name}.rope.scaling.factor"), 1)
            rope["attention_factor"] = _number(file, stored) * (0.1 * math.log(factor) + 1)
    return rope


def _token_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens in the keys of config.json; several end tokens become a list."""
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
