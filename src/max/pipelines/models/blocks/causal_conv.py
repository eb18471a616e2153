"""The causal convolution of recurrent layers."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.kernels.recurrence import causal_conv_ragged
from max.nn.kv_cache import KVCacheParams, RecurrentState
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Module

__all__ = ["CausalConv", "conv_state", "conv_taps"]

_STATE = "conv"
"""The name of the state."""


class CausalConv(Module):
    """A causal convolution of each channel. The state ``conv`` holds a sequence's last ``taps - 1`` inputs.

    Weights: ``weight`` ``[taps, channels]`` (see `conv_taps`), ``bias`` ``[channels]``; float32.

    Args:
        channels: The number of channels.
        taps: The number of inputs that an output depends on.
        has_bias: Whether there is a bias.
        kv_params: The shape of the cache, with the states.
        device: Where it runs.
        activation: The activation of the result; None: none.
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        has_bias: bool,
        kv_params: KVCacheParams,
        device: DeviceRef,
        activation: Literal["silu"] | None = None,
    ) -> None:
        self.channels, self.kv_params, self.device = channels, kv_params, device
        self.activation = activation
        self.weight = Weight("weight", DType.float32, [taps, channels], device)
        self.bias = Weight("bias", DType.float32, [channels], device) if has_bias else None

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The convolution ``[total_seq_len, channels]``, of x's dtype.

        Args:
            layer_idx: The layer's number among the recurrent layers, uint32, rank 0.
            x: ``[total_seq_len, channels]``.
            kv_collection: The cache; the state is updated.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        """
        state, slots = kv_collection.state(self.kv_params, _STATE)
        bias = self.bias
        return causal_conv_ragged(
            x,
            self.weight,
            # the op takes a bias in any case
            ops.constant(np.zeros(self.channels, np.float32), DType.float32, self.device)
            if bias is None
            else bias,
            input_row_offsets,
            kv_collection.cache_lengths,
            slots,
            state,
            layer_idx,
            self.activation,
        )


def conv_state(layers: int, taps: int, channels: int) -> RecurrentState:
    """The state of `CausalConv`, by sequence and layer.

    Args:
        layers: The number of recurrent layers.
        taps: The number of inputs that an output depends on.
        channels: The number of channels.
    """
    return RecurrentState(_STATE, layers, (taps - 1, channels))


def conv_taps(filters: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The weight of `CausalConv`, ``[taps, channels]``, from the filters of a checkpoint.

    Args:
        filters: ``[channels, 1, taps]``.
    """
    # from [channels, 1, taps], as torch's `Conv1d` stores filters
    return np.ascontiguousarray(filters[:, 0].astype(np.float32).T)
