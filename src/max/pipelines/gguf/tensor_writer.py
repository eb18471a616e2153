"""Converts the weights of a decoder to tensors of a GGUF file: the inverse of `tensor_names.decoder_weights`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.graph.weights import WeightData
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.tensor_names import names_in_file, renamed_weight
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.delta_net import DeltaNetForm
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.parallel_hybrid import ParallelHybridForm
from max.pipelines.models.blocks.rope import RopeConfig
from max.pipelines.models.blocks.state_space import Mamba2Form
from max.pipelines.models.decoder.config import DecoderConfig

__all__ = ["StoredWeight", "rope_factors", "stored_weights"]

Array = npt.NDArray[Any]

_MIXER = (
    ".mixer.A",
    ".mixer.D",
    ".mixer.norm.weight",
    ".mixer.conv1d.weight",
    ".mixer.conv.weight",
)
"""Ends of the names of recurrent layers' parameters that files store in another shape."""
_VECTORS_OF_TOKENS = "per_layer.embed_tokens_per_layer.weight"
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of a GGUF file.

    Args:
        own_name: The decoder's name of the weight.
        name: Its name in the file.
        shape: Its shape.
        values: Computes the values.
        column_order: The decoder's columns in the file's order; None: the order is the same.
    """

    own_name: str
    name: str
    shape: tuple[int, ...]
    values: Callable[[], Array]
    column_order: Array | None = None

    @property
    def input_names(self) -> list[str]:
        """The decoder's names of the weights with the same input: its own, and those of all parts of a fused
        projection.
        """
        stem, _, end = self.own_name.rpartition(".")
        layer, _, projection = stem.rpartition(".")
        return [self.own_name, *(f"{layer}.{part}.{end}" for part in _PARTS.get(projection, ()))]


def stored_weights(
    config: DecoderConfig, form: GGUFForm, weights: Mapping[str, WeightData]
) -> list[StoredWeight]:
    """The tensors of the file of a model.

    Args:
        config: The shape of the model.
        form: The form of its family.
        weights: Floats by the decoder's names, fused projections split.

    Raises:
        ModelFilesError: A weight has no name in files of the family.
    """
    layer, top = names_in_file(form, weights)
    attention = config.first_form(AttentionForm)
    permuted = form.permuted and attention is not None and not attention.interleaved
    result: list[StoredWeight] = []
    prefixes = {f"{own}.": stored for stored, own in form.stacks.items()}
    for prefix, stored in prefixes.items():
        by_index = {
            int(name.removeprefix(prefix).partition(".")[0]): weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        if by_index:
            parts = [by_index[index] for index in sorted(by_index)]
            result.append(_stack(f"{prefix}weight", stored, parts))
    single = {name: w for name, w in weights.items() if not name.startswith((*prefixes,))}
    for own_name, parts in _fused_groups(form, single).items():
        name = renamed_weight(own_name, ("layers", "blk"), layer, top)
        if name is None:
            raise ModelFilesError(
                f"the weight {own_name!r} has no name in GGUF files of {form.name}",
                "Check that config.json and the weight files belong together.",
            )
        result.append(_stored_weight(config, permuted, own_name, parts, name))
    if _parallel_hybrid(config) is not None and "lm_head.weight" not in weights:
        # a tied output layer with other factors than the embedding needs a tensor of its own
        parts = [weights["embed_tokens.weight"]]
        result.append(_stored_weight(config, permuted, "lm_head.weight", parts, "output.weight"))
    return result


def _fused_groups(form: GGUFForm, weights: Mapping[str, WeightData]) -> dict[str, list[WeightData]]:
    """Groups the weights: the parts of a fused projection form one group."""
    joined: dict[str, list[WeightData]] = {}
    for name, value in weights.items():
        stem, _, end = name.rpartition(".")
        layer, _, projection = stem.rpartition(".")
        fused_name = next(
            (
                fused_name
                for fused_name, parts in _PARTS.items()
                if projection in parts
                and (fused_name in form.fused_projections or layer.endswith(".beside.experts"))
            ),
            None,
        )
        if fused_name is None:
            joined[name] = [value]
        elif projection == _PARTS[fused_name][0]:
            joined[f"{layer}.{fused_name}.{end}"] = [
                weights[f"{layer}.{part}.{end}"] for part in _PARTS[fused_name]
            ]
    return joined


def _stack(own_name: str, name: str, parts: Sequence[WeightData]) -> StoredWeight:
    """Stacks weights of equal shape along a new first dimension."""
    shape = (len(parts), *(int(size) for size in parts[0].shape))
    return StoredWeight(
        own_name,
        name,
        shape,
        lambda: np.stack([Tensor.from_dlpack(part.data).to_numpy() for part in parts]),
    )


def _stored_weight(
    config: DecoderConfig, permuted: bool, own_name: str, parts: Sequence[WeightData], name: str
) -> StoredWeight:
    """The weight as a file has it: its parts joined and its rows in the order of GGUF files."""
    shapes = [tuple(int(size) for size in part.shape) for part in parts]
    shape = shapes[0]
    # the axis of rows; experts have a leading axis
    axis = 1 if len(shape) == 3 else 0
    if len(parts) > 1:
        rows = sum(sizes[axis] for sizes in shapes)
        shape = (*shape[:axis], rows, *shape[axis + 1 :])
    steps = _steps(config, permuted, own_name)

    def values() -> Array:
        arrays: list[Array] = [Tensor.from_dlpack(part.data).to_numpy() for part in parts]
        array = np.concatenate(arrays, axis) if len(arrays) > 1 else arrays[0]
        for step in steps:
            array = step(array)
        return np.ascontiguousarray(array)

    if own_name == _VECTORS_OF_TOKENS:
        shape = (config.vocab_size, *shape[1:])
    if own_name.endswith(_MIXER):
        # all other conversions keep the shape
        shape = _mixer_form(config, own_name, np.empty(shape, np.int8)).shape
    order: Array | None = None
    delta = config.first_form(DeltaNetForm)
    if delta is not None and own_name.endswith(".mixer.out_proj.weight"):
        order = _order_of_heads(delta, delta.value_dim)
    return StoredWeight(own_name, name, shape, values, order)


def _steps(config: DecoderConfig, permuted: bool, own_name: str) -> list[Callable[[Array], Array]]:
    """The conversions from a weight of the decoder to the tensor of the file, in order."""
    steps: list[Callable[[Array], Array]] = []
    stem, _, end = own_name.rpartition(".")
    layer = stem.rpartition(".")[2]
    if end == "weight" and (offset := norm_offset(config, stem)):
        steps.append(lambda array: array.astype(np.float32) + np.float32(offset))
    if permuted and layer in ("q_proj", "k_proj"):
        attention = config.attention
        heads = (
            attention.num_attention_heads if layer == "q_proj" else attention.num_key_value_heads
        )
        steps.append(lambda array: neighbors(array, heads))
    if (factor := model_factor(config, own_name)) is not None:
        steps.append(lambda array: array.astype(np.float32) * factor)
    delta = config.first_form(DeltaNetForm)
    if delta is not None and ".mixer." in own_name:
        steps += _delta_steps(delta, layer, own_name)
    if own_name == _VECTORS_OF_TOKENS:
        steps.append(lambda array: _padded_rows(array, config.vocab_size))
    if own_name.endswith(_MIXER):
        steps.append(lambda array: _mixer_form(config, own_name, array))
    return steps


def _delta_steps(form: DeltaNetForm, layer: str, own_name: str) -> list[Callable[[Array], Array]]:
    """The conversions of delta net weights to the row order of files."""
    if layer == "in_proj_ba":
        order = np.argsort(np.concatenate([*form.rows_of(layer).values()]))
        return [lambda array: array[order]]
    if not form.gguf_tiled or layer == "norm":
        return []
    # elements per value head; in fused weights the keys precede the values
    size = 1 if layer in ("in_proj_b", "in_proj_a", "mixer") else form.value_dim
    first = 2 * form.key_heads * form.key_dim if layer in ("in_proj_qkv", "conv1d") else 0
    values = _order_of_heads(form, size)
    order = np.concatenate([np.arange(first), first + values])
    # value heads are channels in the convolution, and columns in the last projection
    axis = -1 if layer in ("conv1d", "out_proj") else 0
    return [lambda array: np.take(array, order, axis)]


def _order_of_heads(form: DeltaNetForm, size: int) -> Array:
    """The indices that put value heads of `size` elements into the order of files."""
    heads = np.arange(form.num_heads * size).reshape(form.key_heads, -1, size)
    return (heads.swapaxes(0, 1) if form.gguf_tiled else heads).reshape(-1)


def norm_offset(config: DecoderConfig, stem: str) -> float:
    """The offset that a norm adds to its weight; files store the sum."""
    if stem.endswith((".q_norm", ".k_norm")):
        attention = config.first_form(AttentionForm)
        spec = None if attention is None else attention.qk_norm
        return 0.0 if spec is None else spec.form.offset
    # norms of latents and of recurrent layers have their plain weights
    if "norm" not in stem or ".mixer." in stem or ".self_attn." in stem:
        return 0.0
    return config.norm.offset


def _padded_rows(rows: Array, count: int) -> Array:
    """Pads the rows to one per token; tokens past the table get row 0."""
    more = np.broadcast_to(rows[:1], (max(count - len(rows), 0), *rows.shape[1:]))
    return np.concatenate([rows[:count], more])


def neighbors(rows: Array, heads: int) -> Array:
    """Reorders rows of heads so that the elements of a rotated pair, which are half a head apart, become adjacent."""
    pairs = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def model_factor(config: DecoderConfig, own_name: str) -> Array | None:
    """The factor of the model that is multiplied into a weight, as files cannot state it; a column if rows differ."""
    outer, form, mlp = (
        _parallel_hybrid(config),
        config.first_form(Mamba2Form),
        config.first_form(MLPForm),
    )
    if outer is None or form is None or mlp is None:
        return None
    attention, (gate, down) = outer.attention, mlp.factors or (1.0, 1.0)
    bias = own_name.endswith(".bias")
    # files state no factor of scores: keys take it, relative to the usual one
    keys = attention.score_factor * attention.head_dim**0.5
    # a factor of the input does not change a bias
    inner = 1.0 if bias else outer.attention_in
    parts = np.repeat(np.array(form.factors, np.float32), form.parts)
    factors: dict[str, Any] = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": 1 / config.logits_scaling,
        "q_proj": inner,
        "k_proj": inner * keys,
        "v_proj": inner,
        "o_proj": outer.attention_out,
        "in_proj": parts if bias else parts[:, None] * form.in_factor,
        "out_proj": outer.recurrent_out,
        "gate_proj": gate,
        "down_proj": down,
    }
    factor = factors.get(own_name.split(".")[-2]) if "." in own_name else None
    return None if factor is None else np.asarray(factor, np.float32)


def _parallel_hybrid(config: DecoderConfig) -> ParallelHybridForm | None:
    """The mixers with attention and a recurrent layer in parallel; None: there are none."""
    mixer = config.blocks[0].mixer
    return mixer if isinstance(mixer, ParallelHybridForm) else None


def _mixer_form(config: DecoderConfig, own_name: str, array: Array) -> Array:
    """Converts parameters of recurrent layers to the shapes in files."""
    form = config.recurrence
    if (
        own_name.endswith((".conv1d.weight", ".conv.weight"))
        or own_name.endswith(".A")
        and array.ndim == 2
    ):
        return array.T
    if isinstance(form, Mamba2Form):
        groups = form.groups if own_name.endswith("norm.weight") else array.size
        return array.reshape(groups, -1)
    return array


def rope_factors(config: DecoderConfig) -> dict[str, Array]:
    """The tensors of frequency divisors: for Llama 3's scaling, LongRoPE, and models that rotate a fraction of a head.

    Args:
        config: The shape of the model.
    """
    rotated = [form for form in config.every(AttentionForm) if form.rope is not None]
    # those of layers without a window; latent attention scales in other ways
    form = min(rotated, key=lambda form: form.window is not None, default=None)
    if form is None or form.rope is None:
        return {}
    rope, parameters = form.rope, form.rope.parameters
    if rope.kind == "llama3":
        return {"rope_freqs.weight": _llama3_factors(rope, rope.rotated_dim or form.head_dim)}
    if rope.kind == "factors":
        return {"rope_freqs.weight": np.array(parameters["factors"], np.float32)}
    if rope.kind == "proportional":
        # files store a large number instead of infinity
        divisors = np.minimum(rope.proportional_divisors(form.head_dim), 1e30)
        return {"rope_freqs.weight": divisors.astype(np.float32)}
    if rope.kind == "longrope":
        return {
            f"rope_factors_{part}.weight": np.array(parameters[f"{part}_factor"], np.float32)
            for part in ("long", "short")
        }
    return {}


def _llama3_factors(rope: RopeConfig, dim: int) -> Array:
    """The divisors of the rotation's frequencies, `[dim / 2]`."""
    parameters = rope.parameters
    factor, low, high = (
        float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = float(parameters["original_max_position_embeddings"])
    lengths = 2 * math.pi * rope.theta ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
