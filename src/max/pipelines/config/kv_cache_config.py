"""The options of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from max._spelling import did_you_mean
from max.dtype import DType
from max.pipelines.config.options import StrictConfig, option
from max.pipelines.core.exceptions import ConfigError

__all__ = ["CACHE_FORMATS", "KVCacheConfig"]


def _parse_cache_strategy(value: Any) -> str:
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


def _parse_cache_format(value: Any) -> str | None:
    text = None if value is None else str(value)
    if text is None or text in CACHE_FORMATS:
        return text
    near = did_you_mean(text, list(CACHE_FORMATS))
    raise ConfigError(
        f"kv_cache_format is {value!r}, which does not fit{near}",
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
