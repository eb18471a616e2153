"""Latent attention in GGUF files: sizes in the metadata, and weights that files split by head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.dtype.blocks import decode
from max.graph.weights import GGUFFile, WeightData
from max.pipelines.core.exceptions import ModelFilesError, WeightsError

__all__ = ["joined_latents", "latents_of"]

_FOLDER = "Give the model's folder in the Hugging Face layout with --model, and the file with --weight-path."
_SIGMOID = 2
"""llama.cpp's code of routers with sigmoid scores."""


def latents_of(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that DeepSeek's GGUF files state in a family-specific form.

    Args:
        file: The file.
        config: The keys of config.json that are already known.

    Raises:
        ModelFilesError: A number does not fit.
    """
    values, name = file.metadata, "deepseek2"

    def number(key: str) -> Any:
        """The number of a key, 0 if it is absent; raises for other values."""
        value = values.get(f"{name}.{key}", 0)
        # the comparison is false for NaN too
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ModelFilesError(
                f"{file.path}: {name}.{key} is {value!r}, expected a number from 0", _FOLDER
            )
        return value

    def stated(key: str, otherwise: str) -> int:
        return int(number(key) or number(otherwise))

    # files with a separate key weight per head state the sizes with the suffix `_mla`
    head = stated("attention.key_length_mla", "attention.key_length")
    rotated = int(number("rope.dimension_count"))
    special: dict[str, Any] = {
        "head_dim": None,
        "num_key_value_heads": None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": stated("attention.value_length_mla", "attention.value_length"),
    }
    if values.get(f"{name}.expert_gating_func") == _SIGMOID:
        special["architectures"] = ["DeepseekV3ForCausalLM"]
        special["model_type"] = "deepseek_v3"
    elif config.get("n_group", 1) > 1:
        special["topk_method"] = "group_limited_greedy"
    weight = 10.0 * number("rope.scaling.yarn_log_multiplier")
    if weight:
        special["rope_parameters"] = {"mscale": weight, "mscale_all_dim": weight}
    return special


def joined_latents(state_dict: dict[str, WeightData]) -> dict[str, WeightData]:
    """Replaces the separate expansions of latents to keys and to values by one ``kv_b_proj``; the result is in floats.

    Args:
        state_dict: The weights by the decoder's names; `k_b_proj` is ``[heads, latent, key]``, `v_b_proj`
            ``[heads, value, latent]``.

    Raises:
        WeightsError: One of the two is missing, or their shapes do not match.
    """
    suffix, joined = ".k_b_proj.weight", dict(state_dict)
    for name in state_dict:
        if (
            name.endswith(".kv_b_proj.weight")
            and state_dict[name].quantization_encoding is not None
        ):
            joined[name] = _as_bfloat16(name, _floats(state_dict[name]))
        if not name.endswith(suffix):
            continue
        stem = name.removesuffix(suffix)
        value = joined.pop(f"{stem}.v_b_proj.weight", None)
        if value is None:
            raise WeightsError(f"the GGUF file has {name}, and not the weight of values")
        keys, values = np.swapaxes(_floats(joined.pop(name)), 1, 2), _floats(value)
        if keys.shape[0] != values.shape[0] or keys.shape[2] != values.shape[2]:
            raise WeightsError(f"{name} is of {list(keys.shape)}, values of {list(values.shape)}")
        both = np.concatenate([keys, values], 1).reshape(-1, keys.shape[2])
        own = f"{stem}.kv_b_proj.weight"
        exact = state_dict[name].quantization_encoding is None
        joined[own] = WeightData.from_numpy(both, own) if exact else _as_bfloat16(own, both)
    return joined


def _as_bfloat16(name: str, values: npt.NDArray[Any]) -> WeightData:
    return WeightData.from_numpy(values.astype(ml_dtypes.bfloat16), name)


def _floats(value: WeightData) -> npt.NDArray[Any]:
    array = Tensor.from_dlpack(value.data).to_numpy()
    encoding = value.quantization_encoding
    return array.astype(np.float32) if encoding is None else decode(array, encoding.value)
