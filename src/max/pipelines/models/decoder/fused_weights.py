"""Splits fused projections of checkpoints into the decoder's projections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.driver import Tensor
from max.dtype.blocks import decode
from max.graph.shape import Shape
from max.graph.weights import WeightData
from max.pipelines.core.exceptions import WeightsError
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.feed_forward import XIELU_PARAMETERS, MLPForm
from max.pipelines.models.decoder.config import DecoderConfig

if TYPE_CHECKING:
    from max.pipelines.models.blocks import delta_net
    from max.pipelines.models.blocks import experts as expert_blocks
else:
    delta_net = lazy_module("max.pipelines.models.blocks.delta_net")
    expert_blocks = lazy_module("max.pipelines.models.blocks.experts")

__all__ = ["split_fused"]

Array = npt.NDArray[Any]


def split_fused(
    config: DecoderConfig, state_dict: Mapping[str, WeightData]
) -> dict[str, WeightData]:
    """Splits ``qkv_proj`` into ``q_proj``, ``k_proj``, ``v_proj``, and ``gate_up_proj`` into its two halves.

    The separate expansions of latents are joined, and decoded if quantized, since keys and values are split later.
    Projections of delta nets are split if the form has separate ones. Activation parameters that the config states are
    added as weights.

    Parts of layout ``rows`` are views of the checkpoint's arrays; parts of layout ``heads`` and of experts are copies.

    Args:
        config: The shape of the model.
        state_dict: The weights by the decoder's names.

    Raises:
        WeightsError: A fused weight has an unexpected number of rows.
    """
    attention = config.first_form(AttentionForm)
    q = kv = 0
    if attention is not None:
        q, kv = (
            n * attention.head_dim
            for n in (attention.num_attention_heads, attention.num_key_value_heads)
        )
    split: dict[str, WeightData] = {}
    for name, value in state_dict.items():
        stem, _, part = name.rpartition(".")
        layer, _, projection = stem.rpartition(".")
        if projection == "qkv_proj":
            _check_rows(name, value, q + 2 * kv)
            rows = None
            if attention is not None and config.qkv_layout == "heads":
                rows = _rows_of_heads(attention)
            bounds = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
        elif projection in ("in_proj_qkvz", "in_proj_ba"):
            delta = config.first_form(delta_net.DeltaNetForm)
            # the layer may have the fused projections itself
            if delta is None or delta.fused:
                split[name] = value
                continue
            places = delta.rows_of(projection)
            _check_rows(name, value, sum(map(len, places.values())))
            array = Tensor.from_dlpack(value.data).to_numpy()
            for own, picked in places.items():
                key = f"{layer}.{own}.{part}"
                split[key] = _part(key, array[picked], value)
            continue
        elif projection == "gate_up_proj" and layer.endswith(".experts"):
            for own, array in _experts_halves(config, name, value):
                key = f"{layer}.{own}.{part}"
                split[key] = _part(key, array, value)
            continue
        elif projection == "gate_up_proj":
            # a shared MLP has a size of its own
            shared = None
            if layer.endswith(".shared"):
                shared = config.first_form(expert_blocks.Experts)
            mlp = config.first_form(MLPForm)
            if shared is not None:
                inner = shared.shared_size
            else:
                inner = 0 if mlp is None else mlp.size
            _check_rows(name, value, 2 * inner)
            rows, bounds = None, {"gate_proj": (0, inner), "up_proj": (inner, 2 * inner)}
        else:
            split[name] = value
            continue
        array = Tensor.from_dlpack(value.data).to_numpy()
        for own, (begin, end) in bounds.items():
            picked = array[begin:end] if rows is None else array[rows[begin:end]]
            key = f"{layer}.{own}.{part}"
            split[key] = _part(key, picked, value)
    for index, block in enumerate(config.blocks):
        mlp = block.feed_forward
        values = mlp.xielu if isinstance(mlp, MLPForm) else ()
        for part, value in zip(XIELU_PARAMETERS, values, strict=False):
            key = f"layers.{index}.mlp.act_fn.{part}"
            # from config.json, unless the checkpoint has them
            split.setdefault(key, WeightData.from_numpy(np.array([value], np.float32), key))
    return _joined_latents(split) if config.has_latents else split


def _part(name: str, array: Array, fused: WeightData) -> WeightData:
    """Wraps rows of a fused weight as a weight."""
    shape = Shape(array.shape)
    return WeightData(
        Tensor.from_numpy(array), name, fused.dtype, shape, fused.quantization_encoding
    )


def _experts_halves(
    config: DecoderConfig, name: str, value: WeightData
) -> Iterator[tuple[str, Array]]:
    """The rows of gate and up projections of all experts, ``[experts, size, …]``."""
    experts = config.first_form(expert_blocks.Experts)
    expected = [] if experts is None else [experts.count, 2 * experts.size]
    if experts is None or [int(size) for size in value.shape[:2]] != expected:
        raise WeightsError(f"{name} is {list(value.shape)}, the model takes {[*expected, '…']}")
    array = Tensor.from_dlpack(value.data).to_numpy()
    pairs = experts.gate_up_layout == "pairs"
    for half, own in enumerate(("gate_proj", "up_proj")):
        # rows of gate and up by turns, or all of gate before all of up
        rows = (
            slice(half, None, 2) if pairs else slice(half * experts.size, (half + 1) * experts.size)
        )
        yield own, np.ascontiguousarray(array[:, rows])


def _check_rows(name: str, value: WeightData, rows: int) -> None:
    if int(value.shape[0]) != rows:
        raise WeightsError(f"{name} has {value.shape[0]} rows, the model takes {rows}")


def _rows_of_heads(form: AttentionForm) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The stored row indices of all queries, keys and values, for checkpoints that store rows by KV head."""
    group = form.num_attention_heads // form.num_key_value_heads
    total = (form.num_attention_heads + 2 * form.num_key_value_heads) * form.head_dim
    # [KV heads, queries of a KV head with its key and value, head_dim]
    # each KV head is stored after the queries that read it
    rows = np.arange(total).reshape(form.num_key_value_heads, group + 2, form.head_dim)
    parts = rows[:, :group], rows[:, group], rows[:, group + 1]
    return np.concatenate([part.reshape(-1) for part in parts])


def _joined_latents(state_dict: dict[str, WeightData]) -> dict[str, WeightData]:
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
        # [heads, head_dim, rank] for both
        keys, values = np.swapaxes(_floats(joined.pop(name)), 1, 2), _floats(value)
        if keys.shape[0] != values.shape[0] or keys.shape[2] != values.shape[2]:
            raise WeightsError(f"{name} is of {list(keys.shape)}, values of {list(values.shape)}")
        both = np.concatenate([keys, values], 1).reshape(-1, keys.shape[2])
        own = f"{stem}.kv_b_proj.weight"
        # keys are transposed, which takes their blocks apart
        exact = state_dict[name].quantization_encoding is None
        joined[own] = WeightData.from_numpy(both, own) if exact else _as_bfloat16(own, both)
    return joined


def _as_bfloat16(name: str, values: Array) -> WeightData:
    return WeightData.from_numpy(values.astype(ml_dtypes.bfloat16), name)


def _floats(value: WeightData) -> Array:
    array = Tensor.from_dlpack(value.data).to_numpy()
    encoding = value.quantization_encoding
    return array.astype(np.float32) if encoding is None else decode(array, encoding.value)
