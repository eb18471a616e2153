"""How float8 weights and activations are scaled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from max._earlier import earlier_names
from max.dtype import DType

__all__ = [
    "Float8Config",
    "Float8InputScaleSpec",
    "Float8ScaleGranularity",
    "Float8ScaleOrigin",
    "Float8WeightScaleSpec",
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


@dataclass
class Float8WeightScaleSpec:
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
class Float8InputScaleSpec:
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
class Float8Config:
    """The float8 parts of a model, and their scales.

    Args:
        input_scale: How inputs are scaled.
        weight_scale: How weights are scaled.
        mlp_in_float8: The layers whose MLP is in float8.
        attn_qkv_in_float8: The layers whose attention projections are in float8.
        embedding_output_dtype: The dtype of the embedding's output.
        bias_dtype: The dtype of biases, the layer's if not given.
        quant_method: The method that made the checkpoint, such as ``fbgemm_fp8``.
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


__getattr__ = earlier_names(__name__)
