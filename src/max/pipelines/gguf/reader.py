"""The config in a GGUF file's metadata, converted to the keys of a Hugging Face config.json.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the form of the file's family adds its
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from max.graph.weights import GGUFFile
from max.pipelines.config.resolver import resolver
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import FOLDER_REMEDY, Metadata

__all__ = ["config_of", "form_of", "window_types"]

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


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Converts the metadata to the object of a config.json.

    Args:
        file: The file.

    Raises:
        ModelFilesError: The metadata lacks a key, or the architecture is not supported.
    """
    values = file.metadata
    name = str(values.get("general.architecture"))
    form: GGUFForm | None = form_of(name, values)
    if form is None:
        raise ModelFilesError(
            f"{file.path}: the architecture {name!r} of GGUF files is not supported; there is "
            f"{', '.join(_form_names())}",
            FOLDER_REMEDY,
        )
    _check_required(file, form)
    metadata = Metadata(file, name)
    config = metadata.config
    for key, stored in {**_REQUIRED, **_OPTIONAL}.items():
        if f"{name}.{stored}" in values and stored not in form.by_layer:
            # a list has a number for each layer, and config.json takes the greatest
            lists = form.hybrid and stored in _BY_LAYER_OF_HYBRIDS
            config[key] = metadata.greatest_number(stored) if lists else metadata.number(stored)
    config |= _counts(metadata)
    config["num_hidden_layers"] = _layers(metadata)
    config |= window_types(metadata)
    flags = {
        key: any(
            t.replace("*", str(i)) in file.tensors for t in tensors for i in range(metadata.layers)
        )
        for key, tensors in _BY_TENSOR.items()
    }
    special = {} if form.read is None else form.read(metadata)
    rope = metadata.rotation()
    size = metadata.head_dim
    config |= {
        **flags,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        # the family's own reading replaces the common one
        **special,
        "rope_parameters": {**rope, **special.get("rope_parameters", {})},
    }
    if f"{name}.rope.dimension_count" in values and "qk_rope_head_dim" not in config:
        config["partial_rotary_factor"] = metadata.number("rope.dimension_count") / size
    return {
        "architectures": [form.class_name],
        "model_type": form.model_type,
        "from_gguf": True,
        **{form.keys.get(key, key): value for key, value in config.items()},
        **form.constants,
        **_token_ids(values),
    }


def _check_required(file: GGUFFile, form: GGUFForm) -> None:
    """Checks the presence of what each file must state, and the embedding.

    Raises:
        ModelFilesError: Something is missing.
    """
    values, name = file.metadata, form.name
    required = {**_REQUIRED, "intermediate_size": None} if form.hybrid else dict(_REQUIRED)
    missing = [key for key in required.values() if key and f"{name}.{key}" not in values]
    if form.needs_epsilon and not any(f"{name}.{key}" in values for key in _EPSILONS.values()):
        missing.append(" or ".join(_EPSILONS.values()))
    if missing:
        raise ModelFilesError(
            f"{file.path}: the metadata lacks {', '.join(missing)}", FOLDER_REMEDY
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFilesError(f"{file.path} has no token_embd.weight", FOLDER_REMEDY)
    if len(embedding.shape) != 2:
        raise ModelFilesError(
            f"{file.path}: token_embd.weight has the shape {list(embedding.shape)}, expected two sizes",
            FOLDER_REMEDY,
        )


def _layers(metadata: Metadata) -> int:
    """The number of layers, without those for multi-token prediction, which config.json does not count."""
    config = metadata.config
    blocks = config["num_hidden_layers"]
    prediction_layers = config.get("num_nextn_predict_layers", 0)
    if type(blocks) is not int or blocks > _MOST_LAYERS:
        raise metadata.error("block_count", blocks, f"an integer from 1 to {_MOST_LAYERS}")
    if type(prediction_layers) is not int or prediction_layers >= blocks:
        raise metadata.error(
            "nextn_predict_layers", prediction_layers, f"an integer below block_count, {blocks}"
        )
    return blocks - prediction_layers


def window_types(metadata: Metadata) -> dict[str, Any]:
    """The keys of config.json that state which layers have a window, if the file states it.

    Args:
        metadata: The metadata.

    Raises:
        ModelFilesError: The file has a list of another length.
    """
    key = "attention.sliding_window_pattern"
    pattern = metadata.value(key)
    if pattern is None:
        return {}
    if type(pattern) is int and pattern > 0:
        return {"sliding_window_pattern": pattern}
    if not isinstance(pattern, np.ndarray) or len(pattern) != metadata.layers:
        raise metadata.error(key, pattern, f"a period, or {metadata.layers} flags")
    types = [f"{'sliding' if local else 'full'}_attention" for local in pattern.tolist()]
    return {"layer_types": types, "use_sliding_window": True}


def _counts(metadata: Metadata) -> dict[str, Any]:
    """The numbers of experts and latent sizes, and whether the weights of experts are normalized."""
    counts: dict[str, Any] = {
        key: metadata.least_zero(stored)
        for key, stored in _COUNTS.items()
        if metadata.value(stored) is not None
    }
    key = "expert_weights_norm"
    if metadata.value(key) is not None:
        counts["norm_topk_prob"] = metadata.flag(key, False)
    return counts


def _token_ids(values: Mapping[str, object]) -> dict[str, Any]:
    """The special tokens in the keys of config.json; several end tokens become a list."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {key: f"tokenizer.ggml.{name}_token_id" for key, name in names.items()}
    ids: dict[str, Any] = {
        key: value for key, stored in keys.items() if isinstance(value := values.get(stored), int)
    }
    # the ends of a turn and of a message end an answer too
    others = (values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
    ends = {number for number in others if isinstance(number, int)}
    if ends and "eos_token_id" in ids:
        return {**ids, "eos_token_id": sorted({ids["eos_token_id"], *ends})}
    return ids


def form_of(name: str, metadata: Mapping[str, object]) -> Any:
    """The `GGUFForm` of a file; None if no family has the name.

    Args:
        name: llama.cpp's name of the architecture.
        metadata: The file's metadata.
    """
    fitting = [form for form in resolver().gguf_forms(name) if form.fits(metadata)]
    # the most marks tell the most of a file
    return max(fitting, key=lambda form: len(form.marks), default=None)


def _form_names() -> list[str]:
    """llama.cpp's names of all architectures that have a form."""
    return resolver().gguf_names()
