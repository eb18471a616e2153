"""Layers of graphs without `max.nn.Module`, as 25.x has them: weights are given to their constructors."""

from __future__ import annotations

from max.dtype import DType
from max.graph import (
    DeviceRef,
    TensorValue,
    TensorValueLike,
    Weight,
    ops,
)
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from max.graph.weights import Weights
from max.nn.kernels.gptq import gptq_rows
from max.nn.kernels.products import plain_dtype, project
from max.nn.layer import Layer
from max.nn.layers.norm import layer_norm, parameter_for

__all__ = [
    "EmbeddingV1",
    "GPTQLinearV1",
    "LayerNormV1",
    "LinearV1",
    "MLPV1",
    "QLinearV1",
    "RMSNormV1",
]


class LinearV1(Layer):
    """``y = x Wᵀ + b`` with graph values instead of weights. Deprecated: use `Linear`.

    Args:
        weight: ``[out_dim, in_dim]``.
        bias: ``[out_dim]``.
    """

    __module__ = "max.nn.linear"

    weight: TensorValueLike
    """The weight."""

    bias: TensorValueLike | None = None
    """The bias."""

    def __init__(self, weight: TensorValueLike, bias: TensorValueLike | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: TensorValue) -> TensorValue:
        """``x Wᵀ + b``.

        Args:
            x: ``[…, in_dim]``.
        """
        return project(x, self.weight, self.bias)

    @classmethod
    def create(
        cls,
        dtype: DType,
        quantization_encoding: QuantizationEncoding | None,
        in_features: int,
        out_features: int,
        weights: Weights | Weight,
        bias: Weights | Weight | None = None,
        quantization_config: QuantizationConfig | None = None,
    ) -> LinearV1:
        """Creates a layer with weights of a checkpoint.

        Args:
            dtype: The dtype of the weights.
            quantization_encoding: The encoding of the weight; None: not encoded.
            in_features: The size of the input's last dimension.
            out_features: The size of the output's last dimension.
            weights: The weight, or its entry in a checkpoint.
            bias: The bias, or its entry in a checkpoint.
            quantization_config: The GPTQ parameters; not supported here, use `GPTQLinear`.

        Raises:
            ValueError: The checkpoint's weight has another dtype, shape or encoding, or the encoding is GPTQ.
        """
        if quantization_encoding is QuantizationEncoding.GPTQ or quantization_config is not None:
            raise ValueError("LinearV1: a GPTQ weight comes in parts; use GPTQLinear")
        part_dtype = plain_dtype(dtype, quantization_encoding)

        def parameter(source: Weights | Weight, *shape: int, encoded: bool = False) -> Weight:
            if isinstance(source, Weight):
                return source
            if encoded:
                return source.allocate(None, shape, quantization_encoding)
            return source.allocate(part_dtype, shape)

        encoded = quantization_encoding is not None
        weight = parameter(weights, out_features, in_features, encoded=encoded)
        bias_weight = None if bias is None else parameter(bias, out_features)
        if quantization_encoding is not None:
            return QLinearV1(weight, bias_weight, quantization_encoding)
        return cls(weight, bias_weight)


class QLinearV1(LinearV1):
    """``y = x Wᵀ + b`` with an encoded value of the graph. Deprecated: use `Linear`.

    Args:
        weight: Rows of encoded blocks.
        bias: ``[out_dim]``.
        quantization_encoding: How the weight is encoded in blocks.
    """

    __module__ = "max.nn.linear"

    quantization_encoding: QuantizationEncoding | None = None
    """How the weight is encoded."""

    def __init__(
        self,
        weight: TensorValueLike,
        bias: TensorValueLike | None = None,
        quantization_encoding: QuantizationEncoding | None = None,
    ) -> None:
        super().__init__(weight, bias)
        self.quantization_encoding = quantization_encoding

    def __call__(self, x: TensorValue) -> TensorValue:
        """``x Wᵀ + b``.

        Args:
            x: ``[…, in_dim]``.

        Raises:
            ValueError: The shapes do not fit the encoding.
        """
        return project(x, self.weight, self.bias, self.quantization_encoding)


class GPTQLinearV1(QLinearV1):
    """``y = x Wᵀ + b`` with a GPTQ weight in one value of the graph. Deprecated: use `GPTQLinear`.

    Args:
        weight: uint8 rows of packed integers and scales; see `max.nn.kernels.gptq.gptq_rows`.
        bias: ``[out_dim]``.
        quantization_encoding: GPTQ.
        quantization_config: How the weight was quantized.
        perm_idx: The index of the input that each column of the weight multiplies, integers ``[in_dim]``.

    Raises:
        ValueError: There is no config, or the encoding is not GPTQ.
    """

    __module__ = "max.nn.linear"

    quantization_config: QuantizationConfig | None = None
    """How the weight was quantized."""

    perm_idx: TensorValueLike | None = None
    """The index of the input that each column of the weight multiplies."""

    def __init__(
        self,
        weight: TensorValueLike,
        bias: TensorValueLike | None = None,
        quantization_encoding: QuantizationEncoding | None = None,
        quantization_config: QuantizationConfig | None = None,
        perm_idx: TensorValueLike | None = None,
    ) -> None:
        if quantization_encoding not in (None, QuantizationEncoding.GPTQ):
            raise ValueError(
                f"GPTQLinearV1: the encoding is {quantization_encoding}, expected GPTQ"
            )
        if quantization_config is None:
            raise ValueError("GPTQLinearV1: quantization_config is needed")
        super().__init__(weight, bias, QuantizationEncoding.GPTQ)
        self.quantization_config, self.perm_idx = quantization_config, perm_idx

    def __call__(self, x: TensorValue) -> TensorValue:
        """``x Wᵀ + b``.

        Args:
            x: ``[…, in_dim]``.

        Raises:
            ValueError: The sizes do not fit.
        """
        config = self.quantization_config
        assert config is not None
        weight = gptq_rows(TensorValue(self.weight), int(x.shape[-1]), config)
        if self.perm_idx is not None:
            order = ops.cast(TensorValue(self.perm_idx), DType.int64)
            x = ops.gather(x, order, axis=-1)
        return project(x, ops.cast(weight, x.dtype), self.bias)


class MLPV1(Layer):
    """The gated MLP of three `LinearV1`. Deprecated: use `MLP`.

    Args:
        gate_proj: The gate projection.
        down_proj: The output projection.
        up_proj: The up projection.
    """

    __module__ = "max.nn.linear"

    gate_proj: LinearV1
    """The gate projection."""

    down_proj: LinearV1
    """The output projection."""

    up_proj: LinearV1
    """The up projection."""

    def __init__(self, gate_proj: LinearV1, down_proj: LinearV1, up_proj: LinearV1) -> None:
        self.gate_proj, self.down_proj, self.up_proj = gate_proj, down_proj, up_proj

    def __call__(self, x: TensorValue) -> TensorValue:
        """``down(silu(gate(x)) * up(x))``.

        Args:
            x: ``[…, hidden_dim]``.
        """
        return self.down_proj(ops.silu(self.gate_proj(x)) * self.up_proj(x))


class EmbeddingV1(Layer):
    """An embedding whose table is a graph value. Deprecated: use `Embedding`.

    Args:
        weights: ``[vocab_size, hidden_dim]``.
        device: The device of the lookup.
    """

    __module__ = "max.nn.embedding"

    weights: TensorValueLike
    """The table."""

    device: DeviceRef
    """The device of the lookup."""

    def __init__(self, weights: TensorValueLike, device: DeviceRef) -> None:
        self.weights, self.device = weights, device

    def __call__(self, indices: TensorValueLike) -> TensorValue:
        """The rows.

        Args:
            indices: Integers of any shape.
        """
        return ops.gather(self.weights, TensorValue(indices).to(self.device), axis=0)


class RMSNormV1(Layer):
    """`RMSNorm` with a weight that is a value of the graph. Deprecated: use `RMSNorm`.

    Args:
        weight: ``[dim]``.
        eps: Added to the mean square.
        weight_offset: Added to the weight.
        multiply_before_cast: See `RMSNorm`.
    """

    __module__ = "max.nn.norm"

    weight: TensorValueLike
    """The weight."""

    eps: float = 1e-6
    """The number added to the mean square."""

    weight_offset: float = 0.0
    """The number added to the weight."""

    multiply_before_cast: bool = True
    """Whether the product with the weight is computed before rounding; see `RMSNorm`."""

    def __init__(
        self,
        weight: TensorValueLike,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        multiply_before_cast: bool = True,
    ) -> None:
        self.weight, self.eps = weight, eps
        self.weight_offset, self.multiply_before_cast = weight_offset, multiply_before_cast

    def __call__(self, x: TensorValue) -> TensorValue:
        """The normalized tensor.

        Args:
            x: ``[…, dim]``.
        """
        return ops.rms_norm(
            x,
            parameter_for(self.weight, x),
            self.eps,
            self.weight_offset,
            self.multiply_before_cast,
        )


class LayerNormV1(Layer):
    """`LayerNorm` with parameters that are values of the graph. Deprecated: use `LayerNorm`.

    Args:
        weight: ``[dims]``.
        bias: ``[dims]``.
        eps: Added to the variance.
    """

    __module__ = "max.nn.norm"

    weight: TensorValue
    """The scale."""

    bias: TensorValue | None = None
    """The offset."""

    eps: float = 1e-6
    """The number added to the variance."""

    def __init__(
        self, weight: TensorValue, bias: TensorValue | None = None, eps: float = 1e-6
    ) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: TensorValue) -> TensorValue:
        """The normalized tensor.

        Args:
            x: ``[…, dims]``.
        """
        return layer_norm(x, self.weight, self.bias, self.eps)
