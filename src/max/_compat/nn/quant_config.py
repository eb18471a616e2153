"""`QuantConfig`: the quantization of weights and inputs, with the names and fields of version 26."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from max.dtype import DType
from max.graph import DeviceRef, Shape, TensorType
from max.nn.float8_config import (
    Float8Config,
    Float8InputScaleSpec,
    Float8ScaleGranularity,
    Float8ScaleOrigin,
    Float8WeightScaleSpec,
)

__all__ = ["QuantConfig", "QuantFormat"]


class QuantFormat(Enum):
    """The format of a checkpoint's quantized weights."""

    __module__ = "max.nn.quant_config"

    COMPRESSED_TENSORS_FP8 = "compressed-tensors-fp8"
    """8-bit floats in the format of compressed-tensors."""

    FBGEMM_FP8 = "fbgemm-fp8"
    """8-bit floats with a scale for each row."""

    BLOCKSCALED_FP8 = "blockscaled-fp8"
    """8-bit floats with a scale for each block of rows and columns."""

    MXFP8 = "mxfp8"
    """8-bit floats in blocks of 32 whose scales are powers of 2. No layer supports it."""

    NVFP4 = "nvfp4"
    """4-bit floats in blocks of 16. No layer supports it."""

    MXFP4 = "mxfp4"
    """4-bit floats in blocks of 32. No layer with a config supports it; checkpoints of this format can be loaded."""

    MXFP6 = "mxfp6"
    """6-bit floats in blocks of 32. No layer supports it."""

    INT8_W8A8 = "int8-w8a8"
    """8-bit integers as weights and inputs. No layer supports it."""


_METHODS = {
    QuantFormat.COMPRESSED_TENSORS_FP8: "compressed-tensors",
    QuantFormat.FBGEMM_FP8: "fbgemm_fp8",
    QuantFormat.BLOCKSCALED_FP8: "fp8",
}
"""The formats that layers support, with their `Float8Config.quant_method`."""


@dataclass(init=False)
class QuantConfig(Float8Config):
    """The quantized parts of a model and their scales: a `Float8Config` with the fields of version 26.

    Layers accept it as ``quant_config=`` or ``float8_config=``.

    Args:
        input_scale: How inputs are scaled.
        weight_scale: How weights are scaled.
        mlp_quantized_layers: The layers whose MLP is quantized.
        attn_quantized_layers: The layers whose attention projections are quantized.
        format: The format; must be one of 8-bit floats.
        embedding_output_dtype: The dtype of the embedding's output.
        shared_experts_weight_dtype: The dtype of the weights of shared experts; None: that of the other experts.
        bias_dtype: The dtype of biases; by default that of the layer.

    Raises:
        NotImplementedError: No layer supports the format.
    """

    format: QuantFormat = QuantFormat.BLOCKSCALED_FP8
    shared_experts_weight_dtype: DType | None = None

    def __init__(
        self,
        input_scale: Float8InputScaleSpec,
        weight_scale: Float8WeightScaleSpec,
        mlp_quantized_layers: Iterable[int],
        attn_quantized_layers: Iterable[int],
        format: QuantFormat,
        embedding_output_dtype: DType | None = None,
        shared_experts_weight_dtype: DType | None = None,
        bias_dtype: DType | None = None,
    ) -> None:
        format = QuantFormat(format)
        if format not in _METHODS:
            raise NotImplementedError(
                f"QuantConfig: no layer runs the format {format.value}; there are "
                f"{', '.join(method.value for method in _METHODS)}"
            )
        super().__init__(
            input_scale,
            weight_scale,
            set(mlp_quantized_layers),
            set(attn_quantized_layers),
            embedding_output_dtype,
            bias_dtype,
            _METHODS[format],
        )
        self.format, self.shared_experts_weight_dtype = format, shared_experts_weight_dtype

    @classmethod
    def blockscaled_fp8(
        cls,
        *,
        mlp_quantized_layers: Iterable[int],
        attn_quantized_layers: Iterable[int],
        block_size: int = 128,
        scale_dtype: DType = DType.float32,
        embedding_output_dtype: DType | None = None,
        bias_dtype: DType | None = None,
    ) -> QuantConfig:
        """Creates a config of 8-bit floats with a scale per weight block and dynamic scales per input row and block.

        Args:
            mlp_quantized_layers: The layers whose MLP is quantized.
            attn_quantized_layers: The layers whose attention projections are quantized.
            block_size: Rows and columns of a block of a weight; the columns are also the width of a block of the input.
            scale_dtype: The dtype of the scales.
            embedding_output_dtype: The dtype of the embedding's output.
            bias_dtype: The dtype of biases.
        """
        block = Float8ScaleGranularity.BLOCK
        return cls(
            Float8InputScaleSpec(
                block, Float8ScaleOrigin.DYNAMIC, scale_dtype, block_size=(1, block_size)
            ),
            Float8WeightScaleSpec(block, scale_dtype, (block_size, block_size)),
            mlp_quantized_layers,
            attn_quantized_layers,
            QuantFormat.BLOCKSCALED_FP8,
            embedding_output_dtype,
            bias_dtype=bias_dtype,
        )

    @property
    def mlp_quantized_layers(self) -> set[int]:
        """The layers whose MLP is quantized."""
        return self.mlp_in_float8

    @property
    def attn_quantized_layers(self) -> set[int]:
        """The layers whose attention projections are quantized."""
        return self.attn_qkv_in_float8

    @property
    def scales_granularity_mnk(self) -> tuple[int, int, int]:
        """The numbers of input rows, weight rows and columns that share a scale; -1: all."""
        rows = -1 if self.input_scale.is_tensor else 1
        if self.weight_scale.block_size is not None:
            return rows, *self.weight_scale.block_size
        return rows, (1 if self.weight_scale.is_rowwise else -1), -1

    def shared_experts_dtype(self, routed_weight_dtype: DType) -> DType:
        """The dtype of the weights of shared experts.

        Args:
            routed_weight_dtype: The dtype of the weights of the other experts.
        """
        return self.shared_experts_weight_dtype or routed_weight_dtype

    def shared_experts_use_quant(self, routed_weight_dtype: DType) -> bool:
        """Whether the weights of shared experts are quantized like those of the other experts.

        Args:
            routed_weight_dtype: The dtype of the weights of the other experts.
        """
        return self.shared_experts_dtype(routed_weight_dtype) is routed_weight_dtype

    def quantized_scales_type(self, quantized_shape: Shape, device_ref: DeviceRef) -> TensorType:
        """The type of the scales of an input that is quantized in blocks.

        Args:
            quantized_shape: Rows and columns of the input.
            device_ref: The device of the scales.

        Returns:
            One scale per block of columns and row: ``[blocks, rows]``.

        Raises:
            ValueError: Inputs are not scaled in blocks.
        """
        if self.input_scale.block_size is None:
            raise ValueError(
                f"quantized_scales_type: inputs are scaled by {self.input_scale.granularity.value}, expected block"
            )
        rows, columns = Shape(quantized_shape)
        width = self.input_scale.block_size[1]
        return TensorType(
            self.input_scale.dtype, ((columns + (width - 1)) // width, rows), device_ref
        )


# the decorator looks the module up, which may not be loaded
QuantConfig.__module__ = "max.nn.quant_config"
