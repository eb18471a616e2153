"""Linear layers and the gated MLP of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from max._earlier import earlier_names
from max.dtype import DType
from max.graph import (
    BufferValue,
    DeviceRef,
    ShardingStrategy,
    TensorValue,
    TensorValueLike,
    Weight,
    ops,
)
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from max.graph.weights import Weights
from max.nn._projection import matmul_input, plain_dtype, project, with_bias
from max.nn._scaled import (
    dynamic_scaled_matmul,
    matmul_static_scaled_float8,
    quantize_dynamic_scaled_float8,
    quantize_static_scaled_float8,
    scale_shape,
)
from max.nn._sharding import check_strategy, part_of, parts_of_weight, shard_devices
from max.nn.clamp import clamp
from max.nn.float8_config import Float8Config
from max.nn.layer import Layer, Module

__all__ = [
    "MLP",
    "ColumnParallelLinear",
    "DistributedGemmConfig",
    "GPTQLinear",
    "Linear",
    "LinearV1",
    "MLPV1",
    "QLinearV1",
]

ACTIVATIONS: dict[str, Callable[[TensorValue], TensorValue]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_tanh": lambda x: ops.gelu(x, "tanh"),
    "gelu_quick": lambda x: ops.gelu(x, "quick"),
    "relu": ops.relu,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
}


class Linear(Module):
    """``y = x Wᵀ + b``.

    Shapes: ``x`` is ``[…, in_dim]``, ``y`` is ``[…, out_dim]``, of x's dtype. Sums are accumulated in
    float32. A float32 ``x`` that meets bfloat16 or float16 weights is rounded to their dtype, its
    products are not.

    Args:
        in_dim: The size of the input's last dimension.
        out_dim: The size of the output's last dimension.
        dtype: The dtype of weight and bias; of an encoded weight that of the bias, where uint8 stands
            for float32.
        device: The device of the product.
        has_bias: Whether there is a bias.
        quantization_encoding: How the weight is encoded in blocks; see `max.graph.ops.qmatmul`.
        float8_config: How the float8 weight and the input are scaled; see `float8_product`.
        name: The prefix of the weights' names.
        clip_weight: The weight is clamped to ``[-clip_weight, clip_weight]``.

    Raises:
        ValueError: The encoding is not of blocks, in_dim is not a multiple of its block, an encoded
            weight is to be clamped, or the config does not fit the weight.
    """

    weight: Weight
    """``[out_dim, in_dim]``, or its rows in encoded blocks."""

    bias: Weight | None = None
    """``[out_dim]``."""

    input_scale: Weight | None = None
    """The scale of a float8 layer's inputs, where it is part of the checkpoint."""

    weight_scale: Weight | None = None
    """The scales of a float8 weight."""

    float8_config: Float8Config | None = None
    """How float8 is scaled."""

    device: DeviceRef
    """The device of the product."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: DType,
        device: DeviceRef,
        has_bias: bool = False,
        quantization_encoding: QuantizationEncoding | None = None,
        float8_config: Float8Config | None = None,
        name: str | None = None,
        clip_weight: float | None = None,
    ) -> None:
        if float8_config is not None:
            _check_float8(dtype, float8_config, quantization_encoding, clip_weight)
        if quantization_encoding is not None:
            if not quantization_encoding.is_gguf:
                raise ValueError(
                    f"Linear: a {quantization_encoding.value} weight comes in parts; use GPTQLinear"
                )
            if clip_weight is not None:
                raise ValueError(f"Linear: a {quantization_encoding.value} weight is not clamped")
            dtype = plain_dtype(dtype, quantization_encoding)
        prefix = f"{name}." if name else ""
        self.device = device
        self.clip_weight = clip_weight
        self.weight = Weight(
            f"{prefix}weight", dtype, (out_dim, in_dim), device, quantization_encoding
        )
        self.bias = None
        if has_bias:
            bias_dtype = float8_config.bias_dtype if float8_config else None
            self.bias = Weight(f"{prefix}bias", bias_dtype or dtype, (out_dim,), device)
        self.float8_config = float8_config
        if float8_config is not None:
            spec = float8_config.weight_scale
            shape = scale_shape(spec, out_dim, in_dim)
            self.weight_scale = Weight(f"{prefix}weight_scale", spec.dtype, shape, device)
            if float8_config.is_static:
                static = float8_config.input_scale.dtype
                self.input_scale = Weight(f"{prefix}input_scale", static, (), device)

    def effective_weight(self) -> TensorValue:
        """The weight in the graph, clamped if it is to be."""
        weight: TensorValue = self.weight
        if self.clip_weight is not None:
            weight = clamp(weight, min=-self.clip_weight, max=self.clip_weight)
        return weight

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the weight; None: not split.

        Parts of rows compute parts of the outputs. Parts of columns take parts of the inputs, and
        their results must be summed; the first part adds the bias.
        """
        return self.weight.sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        self.weight.sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[Linear]:
        """The shards of the layer, one per device; their weights are views of this layer's.

        Args:
            devices: The devices of the shards.

        Raises:
            ValueError: There is no sharding strategy, it is for another number of devices, or the
                weight cannot be split so.
        """
        strategy = self.sharding_strategy
        where = shard_devices("Linear", strategy, devices)
        assert strategy is not None
        weights = self.weight.shard(where)
        of_rows = strategy.axis in (0, -2)
        whole = ShardingStrategy.replicate(len(where))
        biases = parts_of_weight(self.bias, replace(strategy, axis=0) if of_rows else whole, where)
        if strategy.axis is not None and not of_rows:
            biases[1:] = [None] * (len(where) - 1)
        parts = [
            part_of(self, Linear, weight=weight, bias=bias, device=device)
            for weight, bias, device in zip(weights, biases, where, strict=True)
        ]
        if self.float8_config is not None:
            scales = parts_of_weight(self.weight_scale, self._scale_strategy(strategy), where)
            inputs = parts_of_weight(self.input_scale, whole, where)
            for part, scale, input_scale in zip(parts, scales, inputs, strict=True):
                part.weight_scale, part.input_scale = scale, input_scale
        return parts

    def _scale_strategy(self, strategy: ShardingStrategy) -> ShardingStrategy:
        """How the scales are split where the weight is split so.

        Raises:
            ValueError: A part of the weight would begin within a block.
        """
        assert self.float8_config is not None and self.weight_scale is not None
        whole = ShardingStrategy.replicate(strategy.num_devices)
        if strategy.axis is None or self.weight_scale.rank == 0:
            return whole
        axis = 0 if strategy.axis in (0, -2) else 1
        if self.weight_scale.shape[axis] == 1:
            return whole
        block = self.float8_config.weight_scale.block_size
        size = int(self.weight.shape[axis])
        if block is not None and size % (block[axis] * strategy.num_devices):
            raise ValueError(
                f"Linear: {strategy.num_devices} devices do not divide the {size} "
                f"{('rows', 'columns')[axis]} of the weight into whole blocks of {block[axis]}"
            )
        return replace(strategy, axis=axis)

    def __call__(self, x: TensorValue) -> TensorValue:
        """``x Wᵀ + b``.

        Args:
            x: ``[…, in_dim]``.

        Raises:
            ValueError: The last dimension is not in_dim.
        """
        if self.float8_config is not None:
            return with_bias(self.float8_product(x, self.float8_config), self.bias)
        return project(x, self.effective_weight(), self.bias, self.weight.quantization_encoding)

    def float8_product(self, x: TensorValue, config: Float8Config) -> TensorValue:
        """``x Wᵀ`` as bfloat16, of an input that is rounded to scaled float8 elements.

        Args:
            x: ``[…, in_dim]``.
            config: How `x` is scaled: by the checkpoint's scale, by a scale a row, or by one a group of a
                row's elements.

        Raises:
            ValueError: The last dimension is not in_dim.
        """
        weight, weight_scale = self.weight, self.weight_scale
        assert weight_scale is not None
        if x.rank < 1 or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"Linear: the input is {x!r}, the weight {weight!r}; the last dimension of the input "
                "must equal the last one of the weight"
            )
        rows = x if x.rank == 2 else ops.reshape(x, (-1, weight.shape[1]))
        spec = config.input_scale
        if self.input_scale is not None:
            elements = quantize_static_scaled_float8(rows, self.input_scale, out_type=weight.dtype)
            y = matmul_static_scaled_float8(elements, weight, self.input_scale, weight_scale)
        else:
            elements, scales = quantize_dynamic_scaled_float8(
                rows,
                spec,
                config.weight_scale,
                scale_ub=spec.activation_scale_ub or math.inf,
                group_size_or_per_token=spec.block_size[1] if spec.block_size else -1,
                out_type=weight.dtype,
                scales_type=spec.dtype,
            )
            y = dynamic_scaled_matmul(
                elements, weight, scales, weight_scale, spec, config.weight_scale
            )
        return y if x.rank == 2 else ops.reshape(y, (*x.shape[:-1], weight.shape[0]))


def _check_float8(
    dtype: DType,
    config: Float8Config,
    encoding: QuantizationEncoding | None,
    clip_weight: float | None,
) -> None:
    """Checks the arguments of a float8 layer.

    Raises:
        ValueError: The config does not fit the weight.
    """
    if not dtype.is_float8():
        raise ValueError(f"Linear: a weight scaled by float8_config is float8, got {dtype.name}")
    if encoding is not None or clip_weight is not None:
        raise ValueError("Linear: a float8 weight is neither encoded in blocks nor clamped")
    spec = config.input_scale
    if spec.is_rowwise or (spec.block_size is not None and spec.block_size[0] != 1):
        given = spec.granularity.value + (f" of {spec.block_size}" if spec.block_size else "")
        raise ValueError(
            f"Linear: inputs are scaled as a tensor, colwise (a scale a row of x) or in blocks of one "
            f"row, got {given}"
        )
    if config.is_static and not spec.is_tensor:
        raise ValueError(
            f"Linear: a static input has one scale, for the tensor, got {spec.granularity.value}"
        )


class ColumnParallelLinear(Linear):
    """A linear layer whose outputs are computed in parts, one per device, and gathered on all devices.

    Args:
        in_dim: The size of the inputs' last dimension.
        out_dim: The size of the outputs' last dimension.
        dtype: The dtype of weight and bias.
        devices: The devices of the parts.
        tied_weight: Another layer's weight to use, ``[out_dim, in_dim]``.
        kwargs: More arguments of `Linear`.

    Raises:
        ValueError: No device, or the outputs cannot be split over the devices.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: DType,
        devices: Sequence[DeviceRef],
        tied_weight: Weight | None = None,
        **kwargs: Any,
    ) -> None:
        if not devices:
            raise ValueError("ColumnParallelLinear: no device is given")
        super().__init__(in_dim, out_dim, dtype, devices[0], **kwargs)
        if tied_weight is not None:
            self.set_shared_weight("weight", tied_weight)
        self.devices = list(devices)
        self.sharding_strategy = ShardingStrategy.rowwise(len(devices))
        self._parts = self.shard(devices)

    def __call__(  # type: ignore[override]
        self, x: Sequence[TensorValue], signal_buffers: Iterable[BufferValue]
    ) -> list[TensorValue]:
        """``x Wᵀ + b`` on each device.

        Args:
            x: The same ``[…, in_dim]`` on each device.
            signal_buffers: One signal buffer per device; see `max.nn.comm.Signals`.

        Raises:
            ValueError: The number of inputs differs from the number of devices, or a shape does not fit.
        """
        if len(x) != len(self._parts):
            raise ValueError(
                f"ColumnParallelLinear: {len(x)} inputs for {len(self._parts)} devices"
            )
        outputs = [part(value) for part, value in zip(self._parts, x, strict=True)]
        return ops.allgather(outputs, signal_buffers, axis=-1)


@dataclass
class DistributedGemmConfig:
    """How products over several devices are computed.

    Args:
        enable_matmul_allreduce: Whether a product and the sum of its parts are one kernel. On CPU
            devices the compiler makes the sum an epilogue of the product wherever it can.
    """

    enable_matmul_allreduce: bool
    """Whether a product and the sum of its parts are one kernel."""

    @staticmethod
    def generate() -> DistributedGemmConfig | None:
        """The default."""
        return DistributedGemmConfig(enable_matmul_allreduce=True)


class LinearV1(Layer):
    """``y = x Wᵀ + b`` with graph values instead of weights. Deprecated: use `Linear`.

    Args:
        weight: ``[out_dim, in_dim]``.
        bias: ``[out_dim]``.
    """

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
        """A layer with weights of a checkpoint.

        Args:
            dtype: The dtype of the weights.
            quantization_encoding: The encoding of the weight; None: not encoded.
            in_features: The size of the input's last dimension.
            out_features: The size of the output's last dimension.
            weights: The weight, or where it is in a checkpoint.
            bias: The bias, or where it is in a checkpoint.
            quantization_config: More on GPTQ, which has several weights: use `GPTQLinear`.

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


class GPTQLinear(Linear):
    """``y = x Wᵀ + b`` with a GPTQ weight, in the parts that its checkpoints have.

    Weights: ``qweight``, ``qzeros``, ``scales``, with `desc_act` ``g_idx``, and ``bias``; see `max.graph.ops.qmatmul`.

    Args:
        in_dim: The size of the input's last dimension.
        out_dim: The size of the output's last dimension.
        dtype: The dtype of scales and bias; uint8 stands for float16.
        device: The device of the product.
        has_bias: Whether there is a bias.
        quantization_encoding: GPTQ.
        quantization_config: How the weight was quantised.
        float8_config: Not supported.

    Raises:
        ValueError: The encoding is another, there is no config, its bits are not 2, 4 or 8, or the sizes cannot be packed.
        NotImplementedError: `float8_config` is given.
    """

    qweight: Weight
    """int32 ``[in_dim * bits / 32, out_dim]``."""
    qzeros: Weight
    """int32 ``[groups, out_dim * bits / 32]``."""
    scales: Weight
    """``[groups, out_dim]``."""
    g_idx: Weight | None
    """int32 ``[in_dim]``: the group of each input."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: DType,
        device: DeviceRef,
        has_bias: bool = False,
        quantization_encoding: QuantizationEncoding | None = None,
        quantization_config: QuantizationConfig | None = None,
        float8_config: Float8Config | None = None,
    ) -> None:
        if float8_config is not None:
            raise NotImplementedError("GPTQLinear: float8 scales do not go with GPTQ weights")
        if quantization_encoding not in (None, QuantizationEncoding.GPTQ):
            raise ValueError(
                f"GPTQLinear: the encoding is {quantization_encoding}, expected GPTQ; use Linear"
            )
        config = quantization_config
        if config is None or config.quant_method != "gptq" or config.bits not in (2, 4, 8):
            raise ValueError(
                f"GPTQLinear: the config is {config!r}, expected quant_method gptq and 2, 4 or 8 bits"
            )
        packed = 32 // config.bits
        if in_dim % packed or out_dim % packed:
            raise ValueError(
                f"GPTQLinear: {in_dim} inputs and {out_dim} outputs, expected multiples of {packed} for "
                f"{config.bits} bits"
            )
        groups = 1 if config.group_size == -1 else -(-in_dim // config.group_size)
        dtype = dtype if dtype.is_float() else DType.float16
        self.device, self.clip_weight, self.quantization_config = device, None, config
        self.qweight = Weight("qweight", DType.int32, (in_dim // packed, out_dim), device)
        self.qzeros = Weight("qzeros", DType.int32, (groups, out_dim // packed), device)
        self.scales = Weight("scales", dtype, (groups, out_dim), device)
        order = Weight("g_idx", DType.int32, (in_dim,), device) if config.desc_act else None
        self.g_idx = order
        self.bias = Weight("bias", dtype, (out_dim,), device) if has_bias else None

    @property
    def weight(self) -> Weight:  # type: ignore[override]
        """The packed integers."""
        return self.qweight

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """None: GPTQ weights are not split. Setting another raises ValueError."""
        return None

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        if strategy is not None:
            raise ValueError("GPTQLinear: GPTQ weights are not split over devices")

    def __call__(self, x: TensorValue) -> TensorValue:
        """``x Wᵀ + b``.

        Args:
            x: ``[…, in_dim]``.

        Raises:
            ValueError: The last dimension is not in_dim.
        """
        parts: list[TensorValue] = [self.qweight, self.qzeros, self.scales]
        if self.g_idx is not None:
            parts.append(self.g_idx)
        y = ops.qmatmul(QuantizationEncoding.GPTQ, self.quantization_config, x, *parts)
        return with_bias(y, self.bias)


class MLP(Module):
    """``down(activation(gate(x)) * up(x))``, the gated MLP (https://arxiv.org/abs/2002.05202).

    Shapes: ``x`` and the result are ``[…, hidden_dim]``.

    Args:
        dtype: The dtype of the weights.
        quantization_encoding: How the weights are encoded.
        hidden_dim: The size of the input's last dimension.
        feed_forward_length: The size between the projections.
        devices: The devices; the layer runs on the first one.
        linear_cls: The class of the projections.
        has_bias: Whether the projections have biases.
        activation_function: silu, gelu, gelu_tanh, gelu_quick, relu, tanh or sigmoid.
        float8_config: How float8 is scaled.
        dist_gemm_config: For several devices.

    Raises:
        ValueError: No device, or an unknown activation.
    """

    def __init__(
        self,
        dtype: DType,
        quantization_encoding: QuantizationEncoding | None,
        hidden_dim: int,
        feed_forward_length: int,
        devices: Sequence[DeviceRef],
        linear_cls: Callable[..., Linear] = Linear,
        has_bias: bool = False,
        activation_function: str = "silu",
        float8_config: Float8Config | None = None,
        dist_gemm_config: DistributedGemmConfig | None = None,
    ) -> None:
        if not devices:
            raise ValueError("MLP: no device is given")
        if activation_function not in ACTIVATIONS:
            raise ValueError(
                f"MLP: the activation is {activation_function!r}, expected one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        self.activation_function = activation_function
        self._sharding: ShardingStrategy | None = None

        def linear(in_dim: int, out_dim: int) -> Linear:
            return linear_cls(
                in_dim=in_dim,
                out_dim=out_dim,
                dtype=dtype,
                device=devices[0],
                has_bias=has_bias,
                quantization_encoding=quantization_encoding,
                float8_config=float8_config,
            )

        self.gate_proj = linear(hidden_dim, feed_forward_length)
        self.down_proj = linear(feed_forward_length, hidden_dim)
        self.up_proj = linear(hidden_dim, feed_forward_length)

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the layer; None: not split.

        ``tensor_parallel`` (or ``rowwise``) gives each device a part of the inner features: its
        results must be summed. ``replicate`` gives each device the whole layer.

        Raises:
            ValueError: It is set to another strategy.
        """
        return self._sharding

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        check_strategy("MLP", strategy, "tensor_parallel", "rowwise", "replicate")
        self._sharding = strategy
        outer = inner = None
        if strategy is not None:
            whole, count = strategy.is_replicate, strategy.num_devices
            outer = strategy if whole else ShardingStrategy.rowwise(count)
            inner = strategy if whole else ShardingStrategy.columnwise(count)
        self.gate_proj.sharding_strategy = self.up_proj.sharding_strategy = outer
        self.down_proj.sharding_strategy = inner

    def shard(self, devices: Iterable[DeviceRef]) -> list[MLP]:
        """The shards of the layer, one per device; their weights are views of this layer's.

        Args:
            devices: The devices of the shards.

        Raises:
            ValueError: There is no sharding strategy, it is for another number of devices, or the
                weights cannot be split so.
        """
        where = shard_devices("MLP", self.sharding_strategy, devices)
        projections = (self.gate_proj, self.down_proj, self.up_proj)
        parts = zip(*(p.shard(where) for p in projections), strict=True)
        return [
            part_of(self, MLP, gate_proj=gate, down_proj=down, up_proj=up)
            for gate, down, up in parts
        ]

    def __call__(self, x: TensorValue) -> TensorValue:
        """``down(activation(gate(x)) * up(x))``.

        Args:
            x: ``[…, hidden_dim]``.

        Raises:
            ValueError: The last dimension is not hidden_dim.
        """
        activation = ACTIVATIONS[self.activation_function]
        gate_proj, up_proj = self.gate_proj, self.up_proj
        if type(gate_proj) is Linear and type(up_proj) is Linear:
            # rounded once for both products; their outputs stay in the weights' dtype
            x_in = matmul_input(x, gate_proj.weight)
        else:
            x_in = x
        hidden = activation(gate_proj(x_in)) * up_proj(x_in)
        y = self.down_proj(hidden)
        return y if y.dtype is x.dtype else ops.cast(y, x.dtype)


class MLPV1(Layer):
    """The gated MLP of three `LinearV1`. Deprecated: use `MLP`.

    Args:
        gate_proj: The gate projection.
        down_proj: The output projection.
        up_proj: The up projection.
    """

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


__getattr__ = earlier_names(__name__)
