"""The options of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from max._lazy import lazy_module
from max._spelling import did_you_mean
from max.dtype import DType
from max.pipelines.config.options import StrictConfig, option
from max.pipelines.core.exceptions import ConfigError

if TYPE_CHECKING:
    from max.nn.kv_cache import cache_params
    from max.nn.kv_cache.cache_params import KVCacheParams
else:
    # reading a configuration imports no engine
    cache_params = lazy_module("max.nn.kv_cache.cache_params")

__all__ = ["CACHE_FORMATS", "KVCacheConfig"]


def _parse_cache_strategy(value: object) -> str:
    """The name of a cache strategy; raises ConfigError for unknown ones."""
    text = str(getattr(value, "value", value))
    strategies = ["model_default", "paged"]
    if text not in strategies:
        raise ConfigError(
            f"cache_strategy is {value!r}, which does not fit{did_you_mean(text, strategies)}",
            f"It must be one of {', '.join(strategies)}.",
        )
    return text


CACHE_FORMATS = {
    "float32": DType.float32,
    "float16": DType.float16,
    "bfloat16": DType.bfloat16,
    "float8_e4m3fn": DType.float8_e4m3fn,
    "q8_0": DType.int8,
}
"""The formats of the KV cache, and the dtypes of its pages."""


def _parse_cache_format(value: object) -> str | None:
    """The name of a cache format, or None; raises ConfigError for unknown ones."""
    text = None if value is None else str(value)
    if text is None or text in CACHE_FORMATS:
        return text
    suggestion = did_you_mean(text, list(CACHE_FORMATS))
    raise ConfigError(
        f"kv_cache_format is {value!r}, which does not fit{suggestion}",
        f"It must be one of {', '.join(CACHE_FORMATS)}.",
    )


@dataclass(kw_only=True)
class KVCacheConfig(StrictConfig):
    """The options of the KV cache."""

    cache_strategy: str = option(
        "The kind of cache: model_default or paged.",
        default="model_default",
        parse=_parse_cache_strategy,
    )
    kv_cache_page_size: int = option("Tokens per page, at least 16.", default=128)
    kv_cache_format: str | None = option(
        "How keys and values are stored: float32, float16, bfloat16, float8_e4m3fn or q8_0 (8 bits, with a scale for "
        "each head's key and value). Not set: as the model's weights, float32 for packed ones.",
        default=None,
        parse=_parse_cache_format,
    )
    enable_prefix_caching: bool = option(
        "Requests with a common prefix share its pages.", default=True
    )
    enable_kvcache_swapping_to_host: bool = option(
        "Copy cached pages to an area of the host when they are taken for other tokens, and back when a prefix or a "
        "preempted request needs them.",
        default=False,
    )
    host_kvcache_swap_space_gb: float = option(
        "The most memory of the host for swapped pages, in GiB; never more than is free.",
        default=50.0,
    )
    kv_cache_folder: Path | None = option(
        "A server keeps cached prefixes in this folder, and finds them at its next start with the same model. "
        "Not set: they are lost.",
        default=None,
    )
    kv_cache_folder_gb: float = option(
        "The most room for them on the disk, in GiB; those used last are kept.", default=1.0
    )
    device_memory_utilization: float = option(
        "The share of the device's free memory for weights and cache.", default=0.9
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_cache_page_size < 16:
            raise ConfigError(
                f"kv_cache_page_size is {self.kv_cache_page_size}", "It must be at least 16."
            )
        if self.enable_kvcache_swapping_to_host and not self.enable_prefix_caching:
            raise ConfigError(
                "enable_kvcache_swapping_to_host is set without enable_prefix_caching",
                "Pages are found again by their prefix: leave --enable-prefix-caching on.",
            )
        if not self.host_kvcache_swap_space_gb > 0:
            raise ConfigError(
                f"host_kvcache_swap_space_gb is {self.host_kvcache_swap_space_gb}",
                "It must be above 0.",
            )
        if not self.kv_cache_folder_gb > 0:
            raise ConfigError(
                f"kv_cache_folder_gb is {self.kv_cache_folder_gb}", "It must be above 0."
            )
        if not 0 < self.device_memory_utilization <= 1:
            raise ConfigError(
                f"device_memory_utilization is {self.device_memory_utilization}",
                "It must be over 0 and at most 1.",
            )

    def cache_dtype(self, default: DType) -> DType:
        """The dtype of the cache's pages.

        Args:
            default: The dtype without `kv_cache_format`.
        """
        return default if self.kv_cache_format is None else CACHE_FORMATS[self.kv_cache_format]

    def to_params(
        self,
        dtype: DType,
        n_kv_heads: int,
        head_dim: int,
        num_layers: int,
        devices: Sequence[object],
        data_parallel_degree: int = 1,
        is_mla: bool = False,
        num_q_heads: int | None = None,
        kvcache_quant_config: None = None,
        page_size: int | None = None,
        window_size: int | None = None,
        allow_kv_head_replication: bool = False,
        speculative_method: None = None,
        num_draft_tokens: int = 0,
    ) -> KVCacheParams:
        """The shape of a model's cache, with these options.

        Args:
            dtype: The dtype of the cache.
            n_kv_heads: The number of KV heads.
            head_dim: The size of a head.
            num_layers: The number of layers with keys and values.
            devices: Where the model runs, as `DeviceRef`.
            data_parallel_degree: The copies of the model.
            is_mla: Whether the model caches latents.
            num_q_heads: Not used: query heads have no cache.
            kvcache_quant_config: None: `kv_cache_format` sets how keys and values are stored.
            page_size: Tokens per page; None: `kv_cache_page_size`.
            window_size: The most tokens that a token sees in any layer, itself included; None: all before it.
            allow_kv_head_replication: Not used: heads are divided over the devices.
            speculative_method: None: nothing drafts tokens.
            num_draft_tokens: 0, as nothing drafts tokens.

        Raises:
            ValueError: An argument requests what is not supported, or does not fit the others.
        """
        for name, value in (
            ("kvcache_quant_config", kvcache_quant_config),
            ("speculative_method", speculative_method),
            ("num_draft_tokens", num_draft_tokens or None),
        ):
            if value is not None:
                raise ValueError(
                    f"KVCacheConfig.to_params: {name} is {value!r}, which is not supported"
                )
        swaps = self.enable_kvcache_swapping_to_host
        return cache_params.KVCacheParams(
            dtype=dtype,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            num_layers=num_layers,
            devices=devices,
            data_parallel_degree=data_parallel_degree,
            is_mla=is_mla,
            page_size=page_size or self.kv_cache_page_size,
            window=window_size,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_kvcache_swapping_to_host=swaps,
            host_kvcache_swap_space_gb=self.host_kvcache_swap_space_gb if swaps else None,
        )
