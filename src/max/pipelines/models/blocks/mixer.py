"""The interface between blocks and their mixers: attention, recurrent layers, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Self

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import DeviceRef, TensorValue
from max.nn.kv_cache import KVCacheParams, RecurrentState
from max.nn.layer import Module
from max.nn.layers.linear import Linear
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.blocks.rope import RopeConfig

__all__ = ["AttentionMixer", "CachedKeys", "Mixer", "Site"]


@dataclass(frozen=True)
class Site:
    """What the layers of a block need from their model.

    Args:
        hidden_size: The size of hidden states.
        norm: The form of the norms over hidden states.
        norm_eps: The epsilon of the norms.
        max_seq_len: The longest sequence to serve.
        kv_params: The shape of the KV cache group that the block uses, or of all groups if it uses several.
        dtype: The dtype of the weights.
        device: Where the layers run.
        linear_cls: The constructor of the projections.
    """

    hidden_size: int
    norm: NormForm
    norm_eps: float
    max_seq_len: int
    kv_params: KVCacheParams
    dtype: DType
    device: DeviceRef
    linear_cls: Callable[..., Linear] = Linear


class CachedKeys(NamedTuple):
    """The keys and values of a mixer in the cache.

    Args:
        n_kv_heads: The number of KV heads.
        head_dim: The size of a head.
        window: The number of tokens that a token sees, including itself; None: all earlier tokens.
        is_latent: Whether one latent is stored for all heads instead.
        index_dim: The size of index keys, which are stored in a group of their own; None: there are none.
    """

    n_kv_heads: int
    head_dim: int
    window: int | None = None
    is_latent: bool = False
    index_dim: int | None = None


class Mixer:
    """The base of mixers' forms: frozen dataclasses that describe a layer and build it.

    A layer has the call signature of `max.pipelines.models.blocks.attention.DecoderAttention`. ``layer_idx`` is its
    index in its cache group, or among the layers with states. A recurrent sequence without cached tokens starts from a
    zero state, regardless of the contents of its slot.
    """

    weights = "mixer"
    """The name of the layer in a block, and of its weights."""

    reads_positions = False
    """Whether the layer needs the position of each token; the cache kernels count positions themselves."""

    @property
    def follows_trees(self) -> bool:
        """Whether new tokens may be a tree of drafted ones, whose rows see the cached tokens and their ancestors."""
        return False

    @property
    def keys(self) -> CachedKeys | None:
        """What the layer stores in the pages of the cache; None: nothing."""
        return None

    @property
    def source(self) -> int | None:
        """The block whose keys and values the layer reads instead of storing its own; None: it reads its own."""
        return None

    def states(self, layers: int) -> tuple[RecurrentState, ...]:
        """The states that the cache keeps for each sequence.

        Args:
            layers: The number of such layers.
        """
        return ()

    def layer(self, site: Site) -> Module:
        """The layer.

        Args:
            site: What it needs from its model.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no layer")

    def part(self, count: int, index: int) -> Self:
        """One device's part of the layer; recurrent layers are not split.

        Args:
            count: The number of devices.
            index: The index of the device.
        """
        return self

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers that it consists of: itself, or those that it joins."""
        return (self,)

    def with_attention(self, **changes: Any) -> Mixer:
        """A copy with changed fields of its attention; itself if it has none.

        Args:
            changes: The fields.
        """
        return self

    def in_gguf(self) -> Mixer:
        """The form of the weights in GGUF files."""
        return self

    def split_problem(self, count: int) -> str | None:
        """What cannot be split over a number of devices; None: nothing.

        Args:
            count: The number of devices.
        """
        return None

    @property
    def positional_key(self) -> object:
        """Equal for layers with the same position-dependent inputs."""
        return None

    def position_inputs(self, site: Site, positions: TensorValue | None) -> list[TensorValue]:
        """The position-dependent inputs of the layer.

        Args:
            site: What the layer needs from its model.
            positions: The position of each token, int64 ``[total_seq_len]``, if a layer of the model reads them.
        """
        return []


class AttentionMixer(Mixer):
    """The base of the forms of attention: the number of query heads, and the rotation; None: heads are not rotated."""

    num_attention_heads: int
    rope: RopeConfig | None

    def with_attention(self, **changes: Any) -> Self:
        """See `Mixer.with_attention`."""
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]
