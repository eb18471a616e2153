"""Recurrent layers in the metadata of GGUF files, converted to keys of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from max.graph.weights import GGUFFile
from max.pipelines.core.exceptions import ModelFilesError

__all__ = ["RECURRENT", "dense_layers", "recurrent_keys"]

_FOLDER = "Give the model's folder in the Hugging Face layout with --model, and the file with --weight-path."


class _Metadata:
    """The metadata and the tensors of a file, for one architecture.

    Args:
        file: The file.
        name: llama.cpp's name of the architecture.
        config: The keys of config.json that are already known.
    """

    def __init__(self, file: GGUFFile, name: str, config: Mapping[str, Any]) -> None:
        self.file, self.name, self.config = file, name, config
        self.layers = int(config["num_hidden_layers"])

    def number(self, key: str, default: int | None = None) -> int:
        """A non-negative integer.

        Raises:
            ModelFilesError: The key is missing and there is no default, or the value is not such an integer.
        """
        value = self.file.metadata.get(f"{self.name}.{key}", default)
        if type(value) not in (int, bool) or value < 0:
            raise ModelFilesError(
                f"{self.file.path}: {self.name}.{key} is {value!r}, expected a number from 0",
                _FOLDER,
            )
        return value

    @property
    def epsilon(self) -> float:
        """The epsilon of RMS norms.

        Raises:
            ModelFilesError: It is missing.
        """
        value = self.config.get("rms_norm_eps")
        if value is None:
            key = f"{self.name}.attention.layer_norm_rms_epsilon"
            raise ModelFilesError(f"{self.file.path}: {key} is missing, expected a number", _FOLDER)
        return value

    def per_layer(self, key: str) -> list[int]:
        """A number per layer; 0 for layers of another kind.

        Raises:
            ModelFilesError: The list has another length.
        """
        value: Any = self.file.metadata.get(f"{self.name}.{key}")
        values: list[Any] = (
            value.tolist() if isinstance(value, np.ndarray) else [value] * self.layers
        )
        if len(values) != self.layers or not all(type(n) is int and n >= 0 for n in values):
            raise ModelFilesError(
                f"{self.file.path}: {self.name}.{key} is {value!r}, expected {self.layers} numbers from 0",
                _FOLDER,
            )
        return values

    def has(self, part: str) -> bool:
        """Whether any layer has a tensor."""
        return any(f"blk.{index}.{part}" in self.file.tensors for index in range(self.layers))

    def layers_with(self, part: str) -> list[int]:
        """The indices of the layers that have a tensor."""
        return [i for i in range(self.layers) if f"blk.{i}.{part}" in self.file.tensors]

    def types(self, attention: str, recurrent: str) -> list[str]:
        """The types of all layers: those without KV heads are recurrent."""
        return [attention if n else recurrent for n in self.per_layer("attention.head_count_kv")]


def _scan(meta: _Metadata) -> dict[str, Any]:
    """The sizes of Mamba's and Mamba 2's layers, under the keys of hybrid models."""
    inner, heads = meta.number("ssm.inner_size"), meta.number("ssm.time_step_rank")
    return {
        "mamba_d_state": meta.number("ssm.state_size"),
        "mamba_d_conv": meta.number("ssm.conv_kernel"),
        "mamba_expand": max(inner // int(meta.config["hidden_size"]), 1),
        "mamba_dt_rank": heads,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // max(heads, 1),
        "mamba_n_groups": meta.number("ssm.group_count", 1) or 1,
        "mamba_proj_bias": meta.has("ssm_in.bias"),
        "mamba_conv_bias": meta.has("ssm_conv1d.bias"),
    }


_ALONE = {
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_rank": "time_step_rank",
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_proj_bias": "use_bias",
    "mamba_conv_bias": "use_conv_bias",
}
_NEMOTRON = {
    **_ALONE,
    "mamba_d_state": "ssm_state_size",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
}


def _mamba(meta: _Metadata) -> dict[str, Any]:
    keys = {_ALONE[key]: value for key, value in _scan(meta).items()}
    inner = meta.number("ssm.inner_size")
    return {**keys, "layer_norm_epsilon": meta.epsilon, "intermediate_size": inner}


def _jamba(meta: _Metadata) -> dict[str, Any]:
    """The keys of Jamba in config.json."""
    return {
        **_scan(meta),
        "layers_block_type": meta.types("attention", "mamba"),
        "moe_layers": meta.layers_with("ffn_gate_inp.weight"),
        "num_experts": meta.config.get("num_experts") or 1,
    }


def _falcon_h1(meta: _Metadata) -> dict[str, Any]:
    """Falcon-H1's factors are not keys: GGUF files multiply them into the weights."""
    return {
        **_scan(meta),
        "mamba_d_ssm": meta.number("ssm.inner_size"),
        "mamba_rms_norm": meta.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": meta.has("ssm_out.bias"),
    }


def _nemotron_h(meta: _Metadata) -> dict[str, Any]:
    """The keys of Nemotron H in config.json; the kind of a layer follows from its sizes."""
    inner = meta.per_layer("feed_forward_length")
    heads = meta.per_layer("attention.head_count_kv")
    routed = meta.layers_with("ffn_gate_inp.weight")
    kinds = [
        "moe" if i in routed else "mlp" if inner[i] else "attention" if heads[i] else "mamba"
        for i in range(meta.layers)
    ]
    scan = {_NEMOTRON[key]: value for key, value in _scan(meta).items()}
    return {
        **scan,
        "layers_block_type": kinds,
        "layer_norm_epsilon": meta.epsilon,
        # files do not state the minimum step size, as llama.cpp has none
        "time_step_min": 1e-30,
    }


def _granite(meta: _Metadata) -> dict[str, Any]:
    """The keys of Granite's hybrid models in config.json."""
    experts = meta.config.get("num_experts") or 0
    key = "expert_shared_feed_forward_length" if experts else "feed_forward_length"
    shared = meta.number(key) if experts else max(meta.per_layer(key))
    rotates = bool(meta.number("rope.scaling.finetuned", 0))
    return {
        **_scan(meta),
        "layer_types": meta.types("full_attention", "linear_attention"),
        "num_experts": experts,
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if rotates else "nope",
    }


def _lfm2(meta: _Metadata) -> dict[str, Any]:
    """The keys of LFM 2 in config.json."""
    return {
        "layer_types": meta.types("full_attention", "conv"),
        "conv_L_cache": meta.number("shortconv.l_cache"),
        "conv_bias": meta.has("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": meta.epsilon,
        "use_expert_bias": meta.has("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "tie_embedding": "output.weight" not in meta.file.tensors,
    }


def dense_layers(file: GGUFFile, count: int) -> list[int]:
    """The indices of the layers without a router of experts.

    Args:
        file: The file.
        count: The number of layers.
    """
    return [i for i in range(count) if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors]


def _delta_nets(meta: _Metadata) -> dict[str, Any]:
    """The keys of Qwen 3-Next and 3.5: layers with a query projection have attention, the others are delta nets."""
    heads = meta.number("ssm.time_step_rank")
    attends = {*meta.layers_with("attn_q.weight")}
    return {
        "layer_types": [
            f"{'full' if index in attends else 'linear'}_attention" for index in range(meta.layers)
        ],
        "linear_num_value_heads": heads,
        "linear_num_key_heads": meta.number("ssm.group_count"),
        "linear_key_head_dim": meta.number("ssm.state_size"),
        "linear_value_head_dim": meta.number("ssm.inner_size") // max(heads, 1),
        "linear_conv_kernel_dim": meta.number("ssm.conv_kernel"),
        "mlp_only_layers": dense_layers(meta.file, meta.layers),
    }


RECURRENT: Mapping[str, Callable[[_Metadata], dict[str, Any]]] = {
    "mamba": _mamba,
    "mamba2": _mamba,
    "jamba": _jamba,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "granitehybrid": _granite,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "qwen3next": _delta_nets,
    "qwen35": _delta_nets,
    "qwen35moe": _delta_nets,
}
"""The functions that read the keys of architectures with recurrent layers."""


def recurrent_keys(file: GGUFFile, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json of a model with recurrent layers.

    Args:
        file: The file.
        name: llama.cpp's name of the architecture, one of `RECURRENT`.
        config: The keys of config.json that all files state.

    Raises:
        ModelFilesError: The metadata lacks a number, or has another value.
    """
    return RECURRENT[name](_Metadata(file, name, config))
