"""The parameters of a KV cache: dtype, heads, pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max._names import lazy_names
from max.dtype import DType
from max.dtype.cache_rows import cache_row_elements
from max.nn.kv_cache.recurrent_state import RecurrentState

if TYPE_CHECKING:
    from max.nn.kv_cache import cache_values
    from max.nn.kv_cache.cache_values import PagedCacheValues
else:
    # imported lazily: parameters are read before graph modules are needed
    cache_values = lazy_module("max.nn.kv_cache.cache_values")

__all__ = ["CACHE_DTYPES", "CacheGroup", "KVCacheParams", "KVCacheStrategy"]

CACHE_DTYPES = (DType.float32, DType.float16, DType.bfloat16, DType.float8_e4m3fn, DType.int8)
"""The dtypes that a cache can have."""


class KVCacheStrategy(str, Enum):
    """How the keys and values of past tokens are stored."""

    MODEL_DEFAULT = "model_default"
    """The default strategy of the model's architecture."""

    PAGED = "paged"
    """Pages of a fixed number of tokens, allocated as sequences grow."""

    def kernel_substring(self) -> str:
        """The strategy's part of kernel names."""
        return self.value

    def uses_opaque(self) -> bool:
        """Whether graphs access the cache only through custom ops."""
        return True


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose keys and values share one shape and one window; each group has its own pages and page tables.

    Args:
        layers: The number of layers.
        n_kv_heads: The number of key (and value) heads over all devices.
        head_dim: The size of a head.
        window: The maximum number of tokens, itself included, that a token attends to in any of the layers; None: all
            before it.
        is_mla: Whether a page holds one row of one head per token, latents or keys, without values.
    """

    layers: int
    n_kv_heads: int
    head_dim: int
    window: int | None = None
    is_mla: bool = False


@dataclass
class KVCacheParams:
    """The parameters of a KV cache.

    Args:
        dtype: The element type of cached keys and values: a float type, or int8, with one scale per key and value of
            each head.
        n_kv_heads: The number of key (and value) heads over all devices.
        head_dim: The size of a head.
        enable_prefix_caching: Whether sequences with a common beginning share its pages.
        enable_kvcache_swapping_to_host: Whether evicted pages are kept in host memory.
        host_kvcache_swap_space_gb: The host memory for evicted pages, in GB; required if swapping is enabled.
        cache_strategy: The strategy of the cache.
        page_size: Tokens per page; required for the paged strategy. MAX documents multiples of 128; this engine accepts
            any size.
        n_devices: The number of devices.
        is_mla: Whether the model has multi-latent attention, which caches one latent head.
        data_parallel_degree: The number of device groups that the batch is split over.
        n_kv_heads_per_device: KV heads per device; computed from the others.
        states: The states of recurrent layers, which a sequence has in addition to its pages, with unique names. Prefix
            caching is unavailable with states, because pages do not hold them.
        window: The maximum number of tokens, itself included, that a token attends to in any layer; None: all before
            it. Pages out of reach of all layers are freed.
        groups: If layers differ in shape or window, the second and further groups of layers; the other fields describe
            the first group.
        num_layers: The number of layers; if set, a page has 128 tokens by default.
        devices: The devices (`DeviceRef`); `n_devices` is their number.
        verifies_trees: Whether the new tokens of a sequence may be a tree of drafted ones: graphs then take the
            ancestors of rows (`RaggedKVCacheInputs.ancestors`).

    Raises:
        ValueError: The values are inconsistent.
    """

    dtype: DType
    n_kv_heads: int
    head_dim: int
    enable_prefix_caching: bool = False
    enable_kvcache_swapping_to_host: bool = False
    host_kvcache_swap_space_gb: float | None = None
    cache_strategy: KVCacheStrategy = KVCacheStrategy.PAGED
    page_size: int | None = None
    n_devices: int = 1
    is_mla: bool = False
    data_parallel_degree: int = 1
    n_kv_heads_per_device: int = 0
    states: tuple[RecurrentState, ...] = field(default=(), repr=False)
    window: int | None = None
    groups: tuple[CacheGroup, ...] = field(default=(), repr=False)
    num_layers: int | None = field(default=None, kw_only=True)
    devices: Sequence[Any] | None = field(default=None, kw_only=True, repr=False)
    verifies_trees: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.devices is not None:
            # 1 is the default: then the list of devices gives the number
            if self.n_devices not in (1, len(self.devices)):
                raise ValueError(
                    f"KVCacheParams: n_devices is {self.n_devices}, and {len(self.devices)} devices are given"
                )
            self.n_devices = len(self.devices)
        if self.num_layers is not None:
            if self.num_layers < 1:
                raise ValueError(
                    f"KVCacheParams: num_layers is {self.num_layers}, expected 1 or more"
                )
            self.page_size = self.page_size or 128
        if self.dtype not in CACHE_DTYPES:
            raise ValueError(
                f"KVCacheParams: dtype is {self.dtype.name}, expected one of "
                f"{', '.join(dtype.name for dtype in CACHE_DTYPES)}"
            )
        for name in ("n_kv_heads", "head_dim", "n_devices", "data_parallel_degree"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"KVCacheParams: {name} is {getattr(self, name)}, expected 1 or more"
                )
        # either all devices share the heads of one batch, or each has its own part of the batch
        if self.data_parallel_degree not in (1, self.n_devices):
            raise ValueError(
                f"KVCacheParams: data_parallel_degree is {self.data_parallel_degree}, expected 1 "
                f"or n_devices ({self.n_devices})"
            )
        tensor_parallel = self.n_devices // self.data_parallel_degree
        if self.is_mla:
            # every device holds the latent head
            self.n_kv_heads_per_device = 1
        elif self.n_kv_heads % tensor_parallel:
            raise ValueError(
                f"KVCacheParams: {self.n_kv_heads} key heads cannot be split over "
                f"{tensor_parallel} devices"
            )
        else:
            self.n_kv_heads_per_device = self.n_kv_heads // tensor_parallel
        if self.cache_strategy == KVCacheStrategy.PAGED and (
            self.page_size is None or self.page_size < 1
        ):
            raise ValueError(
                f"KVCacheParams: page_size is {self.page_size}; the paged strategy needs a "
                "positive number of tokens a page, such as 128"
            )
        if self.enable_kvcache_swapping_to_host and self.host_kvcache_swap_space_gb is None:
            raise ValueError(
                "KVCacheParams: swapping to the host is enabled, so host_kvcache_swap_space_gb "
                "must say how much memory it may take"
            )
        if self.enable_kvcache_swapping_to_host and not self.enable_prefix_caching:
            raise ValueError(
                "KVCacheParams: only pages of prefixes are swapped to the host; set "
                "enable_prefix_caching too"
            )
        if self.states and self.enable_prefix_caching:
            raise ValueError(
                "KVCacheParams: enable_prefix_caching is set, and the model has recurrent states, "
                "which pages of a prefix do not hold"
            )
        if self.verifies_trees and (self.states or self.n_devices > 1):
            raise ValueError(
                f"KVCacheParams: verifies_trees is set, with {len(self.states)} recurrent states and {self.n_devices} "
                "devices; trees are for models without states on one device"
            )
        names = [state.name for state in self.states]
        if len(set(names)) < len(names):
            raise ValueError(f"KVCacheParams: two states of one name in {names}")

    def group(self, index: int) -> KVCacheParams:
        """The parameters of one group of layers.

        Args:
            index: The group; 0 is the first one.

        Raises:
            IndexError: There is no such group.
        """
        if index == 0:
            # `replace` also computes n_kv_heads_per_device of the group's heads
            return replace(self, groups=()) if self.groups else self
        group = self.groups[index - 1]
        return replace(
            self,
            n_kv_heads=group.n_kv_heads,
            head_dim=group.head_dim,
            window=group.window,
            is_mla=group.is_mla,
            groups=(),
        )

    @property
    def stored_head_dim(self) -> int:
        """The elements of a head's key or value in a page; see `max.dtype.cache_rows.cache_row_elements`."""
        return cache_row_elements(self.dtype, self.head_dim)

    @property
    def rotates_stored_keys(self) -> bool:
        """Whether keys may be stored before they are rotated; in 8 bits they would be rounded twice."""
        return self.dtype.size_in_bytes > 1

    @property
    def loaded_dtype(self) -> DType:
        """The dtype of keys and values that are read from the cache: float32 for an 8-bit cache."""
        return self.dtype if self.rotates_stored_keys else DType.float32

    @property
    def dtype_shorthand(self) -> str:
        """``"bf16"`` for bfloat16, otherwise ``"f32"``."""
        return "bf16" if self.dtype is DType.bfloat16 else "f32"

    @property
    def static_cache_shape(self) -> tuple[str, str, str, str, str]:
        """The names of the dimensions of a cache that is not paged."""
        return ("num_layers", "batch_size", "seq_len", "n_kv_heads", "head_dim")

    def copy_as_dp_1(self) -> KVCacheParams:
        """The cache of one group of a data-parallel model.

        Raises:
            ValueError: The devices cannot be divided into the groups.
        """
        if self.n_devices % self.data_parallel_degree:
            raise ValueError(
                f"KVCacheParams: {self.n_devices} devices cannot be divided into "
                f"{self.data_parallel_degree} groups"
            )
        return replace(
            self, n_devices=self.n_devices // self.data_parallel_degree, data_parallel_degree=1
        )

    @property
    def tensor_parallel_degree(self) -> int:
        """The number of devices that share the heads."""
        return self.n_devices // self.data_parallel_degree

    def page_bytes(self, num_layers: int, page_size: int) -> int:
        """The bytes of one page on one device: keys and values of its tokens in all layers, or their latents.

        Args:
            num_layers: The number of layers.
            page_size: Tokens per page.
        """
        # a latent is key and value at once
        rows = (1 if self.is_mla else 2) * num_layers * page_size * self.n_kv_heads_per_device
        return rows * self.stored_head_dim * self.dtype.size_in_bytes

    @property
    def bytes_per_block(self) -> int:
        """The bytes of a page on all devices that share its heads.

        Raises:
            ValueError: `num_layers` or `page_size` is not set.
        """
        if self.num_layers is None or self.page_size is None:
            raise ValueError("KVCacheParams: bytes_per_block needs num_layers and page_size")
        return self.tensor_parallel_degree * self.page_bytes(self.num_layers, self.page_size)

    def get_symbolic_inputs(self, namespace: str = "") -> tuple[PagedCacheValues, ...]:
        """The types of the graph inputs for the cache, as the fields of one object.

        Args:
            namespace: Not used: the symbols of a cache are those of one batch.

        Raises:
            ValueError: `num_layers` or `devices` is not set, or there are several devices.
        """
        return (cache_values.symbolic_values(self),)

    def flattened_kv_inputs(self) -> list[Any]:
        """The types of the graph inputs for the cache, in order.

        Raises:
            ValueError: As for `get_symbolic_inputs`.
        """
        return list(self.get_symbolic_inputs()[0].values)

    def unflatten_kv_inputs(self, it: Iterator[Any]) -> tuple[PagedCacheValues, ...]:
        """Builds the cache from graph inputs; consumes ``len(flattened_kv_inputs())`` inputs.

        Args:
            it: The inputs, starting with the first one of the cache.

        Raises:
            ValueError: There are too few inputs.
        """
        count = len(self.flattened_kv_inputs())
        values = [value for _, value in zip(range(count), it, strict=False)]
        if len(values) < count:
            raise ValueError(f"a paged cache has {count} values, got {len(values)}")
        return (cache_values.PagedCacheValues.of(values, len(self.groups)),)


__getattr__ = lazy_names(__name__)
