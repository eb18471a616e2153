"""Projections of one input, whose weights a checkpoint stores separately or stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, TensorValueLike, Weight, ops
from max.nn.activation import ACTIVATIONS, activation_named, check_limit, limited_product
from max.nn.clamp import clamp
from max.nn.float8_config import Float8Config
from max.nn.layer import Module
from max.nn.layers.linear import Linear

__all__ = ["FusedMLP", "StackedLinear"]


class StackedLinear(Module):
    """Several projections of the same input: ``concat([x Wᵢᵀ + bᵢ])`` along the last axis.

    With ``stacked=False`` each projection is a separate `Linear`, named by `names`. The names of its weights omit the
    attribute of this module: ``self.qkv_proj = StackedLinear(…, names=["q_proj", …])`` has ``q_proj.weight``. With
    ``stacked=True`` one ``weight`` (and ``bias``) holds the rows of all projections, as in ``qkv_proj.weight``.

    Shapes: ``x`` is ``[…, in_dim]``, the result ``[…, sum(out_dims)]``.

    Args:
        in_dim: The size of the last dimension of the input.
        out_dims: The sizes of the projections.
        names: Their names.
        dtype: The dtype of the weights.
        device: The device of the weights.
        stacked: Whether one weight holds the rows of all projections.
        has_bias: Whether the projections have biases.
        linear_cls: The class of separate projections.
        quant_config: The scales of float8 weights and inputs; for separate projections only.
        clip_weight: Clamps the weights to ``[-clip_weight, clip_weight]``.

    Raises:
        ValueError: There is no projection, `names` and `out_dims` differ in length, a name is repeated or is an
            attribute, or `quant_config` is given for a stacked weight.
    """

    __module__ = "max.nn.linear"

    def __init__(
        self,
        in_dim: int,
        out_dims: Sequence[int],
        names: Sequence[str],
        dtype: DType,
        device: DeviceRef,
        stacked: bool = False,
        has_bias: bool = False,
        linear_cls: Callable[..., Linear] = Linear,
        quant_config: Float8Config | None = None,
        clip_weight: float | None = None,
    ) -> None:
        if not out_dims or len(out_dims) != len(names) or len(set(names)) != len(names):
            raise ValueError(
                f"StackedLinear: the sizes are {list(out_dims)} and the names {list(names)}; expected one name of its "
                "own for each size"
            )
        if stacked and quant_config is not None:
            raise ValueError(
                "StackedLinear: quant_config needs stacked=False: each weight has its scales"
            )
        for name in names:
            if not stacked and hasattr(self, name):
                raise ValueError(f"StackedLinear: the name {name!r} is an attribute of the module")
        self.in_dim, self.out_dims, self.names = in_dim, list(out_dims), list(names)
        self.stacked, self.has_bias, self.clip_weight = stacked, has_bias, clip_weight
        if stacked:
            self.weight = Weight("weight", dtype, (sum(out_dims), in_dim), device)
            if has_bias:
                self.bias = Weight("bias", dtype, (sum(out_dims),), device)
            return
        # checkpoints name the projections as parts of the block
        self._omit_module_attr_name = True
        for name, out_dim in zip(names, out_dims, strict=True):
            linear = linear_cls(
                in_dim=in_dim, out_dim=out_dim, dtype=dtype, device=device, has_bias=has_bias,
                float8_config=quant_config, clip_weight=clip_weight,
            )  # fmt: skip
            setattr(self, name, linear)

    @property
    def _linears(self) -> list[Linear]:
        return [getattr(self, name) for name in self.names]

    @property
    def stacked_weight(self) -> TensorValue:
        """The rows of all weights in the graph: ``[sum(out_dims), in_dim]``."""
        if not self.stacked:
            return ops.concat([linear.effective_weight() for linear in self._linears])
        if self.clip_weight is None:
            return self.weight
        return clamp(self.weight, min=-self.clip_weight, max=self.clip_weight)

    @property
    def stacked_bias(self) -> TensorValue | None:
        """The biases of all projections in the graph: ``[sum(out_dims)]``; None without biases."""
        if not self.has_bias:
            return None
        if self.stacked:
            return self.bias
        return ops.concat([linear.bias for linear in self._linears if linear.bias is not None])

    def __call__(self, x: TensorValue) -> TensorValue:
        """The projections, concatenated along the last axis.

        Args:
            x: ``[…, in_dim]``.

        Raises:
            ValueError: The last dimension is not in_dim.
        """
        if not self.stacked:
            return ops.concat([linear(x) for linear in self._linears], axis=-1)
        y = ops.cast(x, self.weight.dtype) @ self.stacked_weight.T
        bias = self.stacked_bias
        return ops.cast(y if bias is None else y + bias, x.dtype)


class FusedMLP(Module):
    """The gated MLP with one weight for gate and up: ``down(activation(x Gᵀ) * (x Uᵀ))``.

    The weight ``gate_up_proj_fused`` is ``[2 * feed_forward_length, hidden_dim]``: the rows of G, then those of U.

    Shapes: ``x`` and the result are ``[…, hidden_dim]``.

    Args:
        dtype: The dtype of the weights.
        hidden_dim: The size of the input's last dimension.
        feed_forward_length: The size between the projections.
        devices: The devices; the layer runs on the first one.
        activation_function: silu, gelu, gelu_tanh, gelu_quick, relu, tanh or sigmoid.
        swiglu_limit: The upper bound of the activation and the bound of the magnitude of the factor that it multiplies;
            0: no bounds.

    Raises:
        ValueError: There is no device, the activation is unknown, or the limit is negative.
    """

    __module__ = "max.nn.linear"

    def __init__(
        self,
        dtype: DType,
        hidden_dim: int,
        feed_forward_length: int,
        devices: Sequence[DeviceRef],
        activation_function: str = "silu",
        swiglu_limit: float = 0.0,
    ) -> None:
        check_limit("FusedMLP", swiglu_limit)
        self.swiglu_limit = swiglu_limit
        if not devices:
            raise ValueError("FusedMLP: no device is given")
        activation_named(activation_function, "FusedMLP")
        self.activation_function = activation_function
        self.feed_forward_length = feed_forward_length
        rows = 2 * feed_forward_length
        self.gate_up_proj_fused = Weight(
            "gate_up_proj_fused", dtype, (rows, hidden_dim), devices[0]
        )
        self.down_proj = Linear(feed_forward_length, hidden_dim, dtype, devices[0])

    def __call__(self, x: TensorValueLike) -> TensorValue:
        """The MLP of each row.

        Args:
            x: ``[…, hidden_dim]``.

        Raises:
            ValueError: The last dimension is not hidden_dim.
        """
        x = TensorValue(x)
        size = self.feed_forward_length
        both = ops.cast(x, self.gate_up_proj_fused.dtype) @ self.gate_up_proj_fused.T
        gate, up = ops.split(both, [size, size], axis=-1)
        factor = ACTIVATIONS[self.activation_function](gate)
        y = self.down_proj(limited_product(factor, up, self.swiglu_limit))
        return ops.cast(y, x.dtype)
