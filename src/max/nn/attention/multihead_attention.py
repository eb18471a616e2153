"""Attention without a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.kernels.products import project
from max.nn.layer import Module
from max.nn.layers.linear import Linear

__all__ = ["MultiheadAttention"]


class MultiheadAttention(Module):
    """``softmax(scale * q kᵀ) v`` of padded batches, in which all tokens of a row attend to each other.

    Weights: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (`Linear`), or ``qkv_proj.weight`` (and
    ``qkv_proj.bias``) instead of the first three. Softmax is computed in float32.

    Args:
        num_attention_heads: The number of heads.
        hidden_size: The size of the input's last dimension, a multiple of `num_attention_heads`.
        devices: The device (exactly one); the CPU by default.
        dtype: The dtype of the weights.
        scale: The scale of the attention scores; ``1 / sqrt(head size)`` by default.
        qkv_has_bias: Whether queries, keys and values have biases.
        o_proj_has_bias: Whether the output projection has a bias.
        stacked_qkv: Whether one weight has the rows of queries, keys and values.

    Raises:
        ValueError: The hidden size is not a multiple of the number of heads.
        NotImplementedError: There is more than one device.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear

    def __init__(
        self,
        num_attention_heads: int,
        hidden_size: int,
        devices: Sequence[DeviceRef] | None = None,
        dtype: DType = DType.float32,
        scale: float | None = None,
        qkv_has_bias: bool = False,
        o_proj_has_bias: bool = False,
        stacked_qkv: bool = False,
    ) -> None:
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"MultiheadAttention: hidden size {hidden_size} cannot be divided into "
                f"{num_attention_heads} heads"
            )
        self.devices = list(devices) if devices else [DeviceRef.CPU()]
        if len(self.devices) > 1:
            raise NotImplementedError(
                f"MultiheadAttention: {len(self.devices)} devices need collectives, which this "
                "engine does not have yet; give one device"
            )
        self.n_heads, self.hidden_size = num_attention_heads, hidden_size
        self.head_dim = hidden_size // num_attention_heads
        self.scale = math.sqrt(1.0 / self.head_dim) if scale is None else scale
        self.stacked_qkv, self.qkv_has_bias = stacked_qkv, qkv_has_bias
        device = self.devices[0]
        if stacked_qkv:
            rows = 3 * hidden_size
            self.qkv_proj = Weight("qkv_proj.weight", dtype, [rows, hidden_size], device)
            self.qkv_proj_bias = (
                Weight("qkv_proj.bias", dtype, [rows], device) if qkv_has_bias else None
            )
        else:
            for name in ("q_proj", "k_proj", "v_proj"):
                linear = Linear(hidden_size, hidden_size, dtype, device, has_bias=qkv_has_bias)
                setattr(self, name, linear)
        self.o_proj = Linear(hidden_size, hidden_size, dtype, device, has_bias=o_proj_has_bias)

    @property
    def wqkv(self) -> TensorValue:
        """The weights of queries, keys and values, stacked by rows."""
        if self.stacked_qkv:
            return TensorValue(self.qkv_proj)
        return ops.concat([p.weight for p in (self.q_proj, self.k_proj, self.v_proj)], axis=0)

    @property
    def wqkv_bias(self) -> TensorValue | None:
        """The biases of queries, keys and values, concatenated; None without biases."""
        if not self.qkv_has_bias:
            return None
        if self.stacked_qkv:
            return None if self.qkv_proj_bias is None else TensorValue(self.qkv_proj_bias)
        biases = [p.bias for p in (self.q_proj, self.k_proj, self.v_proj)]
        return ops.concat([TensorValue(b) for b in biases if b is not None], axis=0)

    def __call__(self, x: TensorValue) -> TensorValue:
        """The attention output.

        Args:
            x: ``[batch, seq_len, hidden_size]``.

        Returns:
            ``[batch, seq_len, hidden_size]``, of x's dtype.

        Raises:
            ValueError: The shape does not fit.
        """
        if x.rank != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(
                f"MultiheadAttention: the input is {x!r}, expected [batch, seq_len, "
                f"{self.hidden_size}]"
            )
        if self.stacked_qkv:
            parts = ops.chunk(project(x, self.wqkv, self.wqkv_bias), 3, axis=2)
        else:
            parts = [p(x) for p in (self.q_proj, self.k_proj, self.v_proj)]
        per_head = [*x.shape[:2], self.n_heads, self.head_dim]
        # [batch, heads, seq_len, head_dim]
        q, k, v = (ops.permute(ops.reshape(p, per_head), [0, 2, 1, 3]) for p in parts)
        # [batch, heads, seq_len, seq_len]
        scores = ops.cast(q @ k.transpose(-1, -2), DType.float32) * self.scale
        attended = ops.cast(ops.softmax(scores), v.dtype) @ v
        merged = ops.reshape(ops.permute(attended, [0, 2, 1, 3]), x.shape)
        return ops.cast(self.o_proj(merged), x.dtype)
