"""How float8 weights and activations are scaled."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from max._names import lazy_names
from max.dtype import DType
from max.graph.weights import WeightData

__all__ = [
    "Float8Config",
    "Float8InputScaleSpec",
    "Float8ScaleGranularity",
    "Float8ScaleOrigin",
    "Float8WeightScaleSpec",
    "parse_float8_config",
]


class Float8ScaleGranularity(Enum):
    """The elements that share a scale."""

    TENSOR = "tensor"
    """The whole tensor."""

    ROWWISE = "rowwise"
    """A row."""

    COLWISE = "colwise"
    """A column."""

    BLOCK = "block"
    """A block of rows and columns."""

    def __str__(self) -> str:
        return str(self.value)


class Float8ScaleOrigin(Enum):
    """The origin of an input's scale."""

    STATIC = "static"
    """The checkpoint."""

    DYNAMIC = "dynamic"
    """The input, while the graph runs."""


def _check_block(what: str, granularity: Float8ScaleGranularity, size: object) -> None:
    if (granularity is Float8ScaleGranularity.BLOCK) != (size is not None):
        raise ValueError(
            f"{what}: granularity {granularity.value} with block_size {size}; a block_size is for "
            "the granularity block, and needed there"
        )


class _Granular:
    """Base of scale specs: the elements that share a scale."""

    granularity: Float8ScaleGranularity
    """The elements that share a scale."""

    @property
    def is_tensor(self) -> bool:
        """Whether the whole tensor has one scale."""
        return self.granularity is Float8ScaleGranularity.TENSOR

    @property
    def is_rowwise(self) -> bool:
        """Whether each row has a scale."""
        return self.granularity is Float8ScaleGranularity.ROWWISE

    @property
    def is_colwise(self) -> bool:
        """Whether each column has a scale."""
        return self.granularity is Float8ScaleGranularity.COLWISE

    @property
    def is_block(self) -> bool:
        """Whether each block has a scale."""
        return self.granularity is Float8ScaleGranularity.BLOCK


@dataclass
class Float8WeightScaleSpec(_Granular):
    """How weights are scaled.

    Args:
        granularity: The elements that share a scale.
        dtype: The dtype of the scales.
        block_size: Rows and columns of a block.

    Raises:
        ValueError: `block_size` does not fit the granularity.
    """

    granularity: Float8ScaleGranularity
    dtype: DType
    block_size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _check_block("Float8WeightScaleSpec", self.granularity, self.block_size)


@dataclass
class Float8InputScaleSpec(_Granular):
    """How a layer's input is scaled.

    Args:
        granularity: The elements that share a scale.
        origin: The origin of the scales.
        dtype: The dtype of the scales.
        activation_scale_ub: An upper bound of dynamic scales.
        block_size: Rows and columns of a block.

    Raises:
        ValueError: `block_size` does not fit the granularity.
    """

    granularity: Float8ScaleGranularity
    origin: Float8ScaleOrigin
    dtype: DType
    activation_scale_ub: float | None = None
    block_size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _check_block("Float8InputScaleSpec", self.granularity, self.block_size)


@dataclass
class Float8Config:
    """The float8 parts of a model, and their scales.

    Args:
        input_scale: How inputs are scaled.
        weight_scale: How weights are scaled.
        mlp_in_float8: The layers whose MLP is in float8.
        attn_qkv_in_float8: The layers whose attention projections are in float8.
        embedding_output_dtype: The dtype of the embedding's output.
        bias_dtype: The dtype of biases; by default that of the layer.
        quant_method: The quantization method of the checkpoint, such as ``fbgemm_fp8``.
    """

    input_scale: Float8InputScaleSpec
    weight_scale: Float8WeightScaleSpec
    mlp_in_float8: set[int]
    attn_qkv_in_float8: set[int]
    embedding_output_dtype: DType | None = None
    bias_dtype: DType | None = None
    quant_method: str | None = None

    @property
    def is_static(self) -> bool:
        """Whether inputs are scaled by static scales of the checkpoint."""
        return self.input_scale.origin is Float8ScaleOrigin.STATIC

    @property
    def is_dynamic(self) -> bool:
        """Whether inputs are scaled dynamically, by their values."""
        return self.input_scale.origin is Float8ScaleOrigin.DYNAMIC


_METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8")
"""The quantization methods of float8 checkpoints."""
_MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def parse_float8_config(
    huggingface_config: Any,
    state_dict: Mapping[str, WeightData],
    dtype: DType,
    state_dict_name_prefix: str = "",
    ignored_modules_prefix: str = "model.",
) -> Float8Config | None:
    """Parses the float8 config of a checkpoint. Supports the methods compressed-tensors, fbgemm_fp8 and fp8.

    Args:
        huggingface_config: The content of config.json, with ``quantization_config``.
        state_dict: The weights, which determine the dtypes of scales, biases and embedding.
        dtype: The dtype of the weights. If it is not a float8 type, the function returns None.
        state_dict_name_prefix: The prefix of the names in `state_dict`.
        ignored_modules_prefix: The prefix before ``layers.0`` in the names of modules that are not in float8.

    Raises:
        ValueError: There is no quantization_config, its method is unknown, or no kernel supports its scales.
    """
    if not dtype.is_float8():
        return None
    config = _plain(getattr(huggingface_config, "quantization_config", None))
    method = config.get("quant_method")
    if method not in _METHODS:
        raise ValueError(
            f"parse_float8_config: quant_method is {method!r}, expected one of {', '.join(_METHODS)}"
        )
    names = {
        name.removeprefix(state_dict_name_prefix): weight for name, weight in state_dict.items()
    }
    scales = _dtype_of(names, (".weight_scale", ".weight_scale_inv"), DType.float32)
    if method == "compressed-tensors":
        inputs, weights = _compressed_scales(config, scales)
        ignored: Iterable[str] = config.get("ignore") or ()
    elif method == "fbgemm_fp8":
        inputs = Float8InputScaleSpec(
            Float8ScaleGranularity.COLWISE,
            Float8ScaleOrigin.DYNAMIC,
            scales,
            activation_scale_ub=config.get("activation_scale_ub"),
        )
        weights = Float8WeightScaleSpec(Float8ScaleGranularity.ROWWISE, scales)
        ignored = config.get("modules_to_not_convert") or ()
    else:
        inputs, weights = _block_scales(config, scales)
        ignored = config.get("modules_to_not_convert") or ()
    patterns = [_pattern(name) for name in ignored]

    def in_float8(part: str, projections: tuple[str, ...]) -> set[int]:
        layers = range(int(huggingface_config.num_hidden_layers))
        # a part of a layer has one dtype: one projection that is left out takes all along
        return {
            i
            for i in layers
            if not any(
                pattern.fullmatch(f"{ignored_modules_prefix}layers.{i}.{part}.{name}")
                for pattern in patterns
                for name in projections
            )
        }

    biases = [weight.dtype for name, weight in names.items() if name.endswith("_proj.bias")]
    return Float8Config(
        inputs,
        weights,
        in_float8("mlp", _MLP),
        in_float8("self_attn", _ATTENTION),
        embedding_output_dtype=_dtype_of(names, ("embed_tokens.weight",), None),
        bias_dtype=biases[0] if biases else None,
        quant_method=method,
    )


def _plain(config: Any) -> dict[str, Any]:
    """Converts a quantization_config to a dictionary.

    Raises:
        ValueError: It is not a dictionary.
    """
    value = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(value, dict):
        raise ValueError(
            f"parse_float8_config: quantization_config is {config!r}; a float8 checkpoint has one in config.json"
        )
    return value


def _dtype_of(weights: Mapping[str, WeightData], ends: tuple[str, ...], default: Any) -> Any:
    """The dtype of the first weight whose name has one of the suffixes `ends`; `default` if there is none."""
    return next((w.dtype for name, w in weights.items() if name.endswith(ends)), default)


def _pattern(name: str) -> re.Pattern[str]:
    """Compiles an entry of the ignored list: the name of a module, which includes its parts, or ``re:`` and a regex."""
    if name.startswith("re:"):
        return re.compile(name.removeprefix("re:"))
    return re.compile(rf"(.*\.)?{re.escape(name)}(\..*)?")


def _compressed_scales(
    config: Mapping[str, Any], dtype: DType
) -> tuple[Float8InputScaleSpec, Float8WeightScaleSpec]:
    """The scales of a compressed-tensors checkpoint with one group of layers."""
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise ValueError(
            f"parse_float8_config: {len(groups)} config_groups, expected one for all layers"
        )
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    if weights.get("type") != "float" or weights.get("num_bits") != 8:
        raise ValueError(
            f"parse_float8_config: weights of {weights.get('num_bits')} bits and type {weights.get('type')!r}, "
            "expected 8 and 'float'"
        )
    kinds = {
        "tensor": Float8ScaleGranularity.TENSOR,
        "channel": Float8ScaleGranularity.ROWWISE,
        "block": Float8ScaleGranularity.BLOCK,
    }
    input_kinds = {
        "tensor": Float8ScaleGranularity.TENSOR,
        # a scale a row of x, which is a column of scales of the shape [groups, rows]
        "token": Float8ScaleGranularity.COLWISE,
        "group": Float8ScaleGranularity.BLOCK,
    }
    kind = kinds.get(str(weights.get("strategy")))
    input_kind = input_kinds.get(str(inputs.get("strategy")))
    if kind is None or input_kind is None:
        raise ValueError(
            f"parse_float8_config: strategies {weights.get('strategy')!r} of weights and {inputs.get('strategy')!r} of "
            "inputs; expected tensor, channel or block, and tensor, token or group"
        )
    block = tuple(weights["block_structure"]) if kind is Float8ScaleGranularity.BLOCK else None
    group = (1, int(inputs["group_size"])) if input_kind is Float8ScaleGranularity.BLOCK else None
    origin = Float8ScaleOrigin.DYNAMIC if inputs.get("dynamic") else Float8ScaleOrigin.STATIC
    return (
        Float8InputScaleSpec(input_kind, origin, dtype, block_size=group),
        Float8WeightScaleSpec(kind, dtype, block),
    )


def _block_scales(
    config: Mapping[str, Any], dtype: DType
) -> tuple[Float8InputScaleSpec, Float8WeightScaleSpec]:
    """The scales of an fp8 checkpoint: blocks of the weight, or the whole tensor."""
    size = config.get("weight_block_size")
    dynamic = config.get("activation_scheme", "dynamic") == "dynamic"
    origin = Float8ScaleOrigin.DYNAMIC if dynamic else Float8ScaleOrigin.STATIC
    if size is None:
        tensor = Float8ScaleGranularity.TENSOR
        return Float8InputScaleSpec(tensor, origin, dtype), Float8WeightScaleSpec(tensor, dtype)
    rows, columns = (int(n) for n in size)
    block = Float8ScaleGranularity.BLOCK
    return (
        Float8InputScaleSpec(block, origin, dtype, block_size=(1, columns)),
        Float8WeightScaleSpec(block, dtype, (rows, columns)),
    )


__getattr__ = lazy_names(__name__)
