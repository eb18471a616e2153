"""Splits fused projections of checkpoints into a decoder's own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from max.driver import Tensor
from max.graph.shape import Shape
from max.graph.weights import WeightData
from max.pipelines.core.exceptions import WeightsError
from max.pipelines.models.decoder_config import DecoderConfig

__all__ = ["split_fused"]


def split_fused(
    config: DecoderConfig, state_dict: Mapping[str, WeightData]
) -> dict[str, WeightData]:
    """The weights with ``qkv_proj`` split into ``q_proj``, ``k_proj``, ``v_proj``, and ``gate_up_proj`` into two.

    Rows of the layout ``rows`` are views of the checkpoint's; those of ``heads`` are copied.

    Args:
        config: The shape of the model.
        state_dict: The weights by the decoder's names.

    Raises:
        WeightsError: A fused weight has another number of rows.
    """
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    split: dict[str, WeightData] = {}
    for name, value in state_dict.items():
        stem, _, part = name.rpartition(".")
        layer, _, projection = stem.rpartition(".")
        if projection == "qkv_proj":
            _check_rows(name, value, q + 2 * kv)
            rows = _rows_of_heads(config) if config.qkv_layout == "heads" else None
            bounds = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
        elif projection == "gate_up_proj":
            _check_rows(name, value, 2 * inner)
            rows, bounds = None, {"gate_proj": (0, inner), "up_proj": (inner, 2 * inner)}
        else:
            split[name] = value
            continue
        array = Tensor.from_dlpack(value.data).to_numpy()
        for own, (begin, end) in bounds.items():
            picked = array[begin:end] if rows is None else array[rows[begin:end]]
            tensor = Tensor.from_numpy(picked)
            key = f"{layer}.{own}.{part}"
            split[key] = WeightData(
                tensor, key, value.dtype, Shape(picked.shape), value.quantization_encoding
            )
    return split


def _check_rows(name: str, value: WeightData, rows: int) -> None:
    if int(value.shape[0]) != rows:
        raise WeightsError(f"{name} has {value.shape[0]} rows, the model takes {rows}")


def _rows_of_heads(config: DecoderConfig) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The stored rows of all queries, all keys and all values, where each KV head stores its own together."""
    group = config.num_heads // config.num_kv_heads
    total = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    rows = np.arange(total).reshape(config.num_kv_heads, group + 2, config.head_dim)
    parts = rows[:, :group], rows[:, group], rows[:, group + 1]
    return np.concatenate([part.reshape(-1) for part in parts])
