"""The interface of recurrent layers in decoders: their states, and the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import KVCacheParams, RecurrentState
from max.nn.layer import Module
from max.nn.layers.linear import Linear

__all__ = ["LayerKind", "ModelSizes", "RecurrentForm"]

LayerKind = Literal["attention", "recurrent", "both", "feed_forward"]
"""The kinds of blocks: attention, a recurrent layer, both in parallel, or only a feed-forward layer."""


class ModelSizes(Protocol):
    """The part of a `DecoderConfig` that recurrent layers read."""

    @property
    def hidden_size(self) -> int:
        """The size of hidden states."""
        ...

    @property
    def norm_eps(self) -> float:
        """The epsilon of the norms."""
        ...


class RecurrentForm(Protocol):
    """The form of a model's recurrent layers, a frozen dataclass, for example of Mamba, Mamba 2 or short
    convolutions.
    """

    def states(self, layers: int) -> tuple[RecurrentState, ...]:
        """The states that the cache keeps for each sequence.

        Args:
            layers: The number of recurrent layers.
        """
        ...

    def layer(
        self,
        config: ModelSizes,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef,
        linear_cls: Callable[..., Linear],
    ) -> Module:
        """A recurrent layer, with the call signature of `max.pipelines.models.decoder_attention.DecoderAttention`.

        ``layer_idx`` is its index among the recurrent layers. A sequence without cached tokens starts from a zero
        state, regardless of the contents of its slot.

        Args:
            config: The shape of the model.
            kv_params: The shape of the cache, with the states.
            dtype: The dtype of the weights.
            device: Where it runs.
            linear_cls: The constructor of the projections.
        """
        ...
