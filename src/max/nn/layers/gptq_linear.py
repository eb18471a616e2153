"""Linear layers with GPTQ weights."""

from __future__ import annotations

from max._names import keyword_aliases
from max.dtype import DType
from max.graph import DeviceRef, ShardingStrategy, TensorValue, Weight, ops
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from max.nn.float8_config import Float8Config
from max.nn.layers.linear import Linear

__all__ = ["GPTQLinear"]


class GPTQLinear(Linear):
    """``y = x Wᵀ + b`` with a GPTQ weight, in the layout of its checkpoints.

    Weights: ``qweight``, ``qzeros``, ``scales``, ``g_idx`` (with `desc_act`) and ``bias``; see `max.graph.ops.qmatmul`.

    Args:
        in_dim: The size of the input's last dimension.
        out_dim: The size of the output's last dimension.
        dtype: The dtype of scales and bias; uint8 stands for float16.
        device: The device of the product.
        has_bias: Whether there is a bias.
        quantization_encoding: GPTQ.
        quantization_config: The quantization parameters of the weight.
        float8_config: Not supported.

    Raises:
        ValueError: The encoding is not GPTQ, the config is missing or not of 2, 4 or 8 bits, or the sizes are not
            multiples of the packed integers.
        NotImplementedError: `float8_config` is given.
    """

    __module__ = "max.nn.linear"

    qweight: Weight
    """int32 ``[in_dim * bits / 32, out_dim]``."""
    qzeros: Weight
    """int32 ``[groups, out_dim * bits / 32]``."""
    scales: Weight
    """``[groups, out_dim]``."""
    g_idx: Weight | None
    """int32 ``[in_dim]``: the group of each input."""

    @keyword_aliases(quant_config="float8_config")
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
        # integers in an int32
        packed = 32 // config.bits
        if in_dim % packed or out_dim % packed:
            raise ValueError(
                f"GPTQLinear: {in_dim} inputs and {out_dim} outputs, expected multiples of {packed} for "
                f"{config.bits} bits"
            )
        # the last group may be shorter
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
        return self.with_terms(x, y)
