"""The interface between pipelines and models with a KV cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from max.driver import Device
from max.dtype import DType
from max.engine import InferenceSession
from max.interfaces import Pipeline
from max.nn.kv_cache.cache_params import KVCacheParams
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import UserError
from max.pipelines.kv_cache.manager import PagedKVCacheManager, load_kv_manager
from max.pipelines.kv_cache.memory import cache_bytes


@runtime_checkable
class KVCacheMixin(Protocol):
    """The methods of a model with a KV cache, besides those of `PipelineModel`."""

    def load_kv_manager(
        self, session: InferenceSession, available_cache_memory: int | None
    ) -> PagedKVCacheManager:
        """Creates the manager of the cache, with the pages of a full batch, or fewer if memory does not suffice.

        Args:
            session: The session of the model.
            available_cache_memory: Bytes for the cache; None: no limit.
        """
        model: Any = self  # the protocol is mixed into a PipelineModel
        params, layers = model.cache_shape(
            model.pipeline_config,
            model.huggingface_config,
            model.devices,
            model.kv_cache_config,
            model.kv_cache_config.cache_dtype(model.encoding.cache_dtype),
        )
        return load_kv_manager(
            params,
            model.pipeline_config.max_batch_size,
            model.max_seq_len,
            layers,
            model.devices,
            session,
            available_cache_memory,
            step_tokens=model.pipeline_config.step_tokens,
            host_memory=model.pipeline_config.host_memory(),
            drafts=model.pipeline_config.is_draft
            or (model.pipeline_config.drafts_tokens and model.verifies_drafts),
        )

    @classmethod
    @abstractmethod
    def get_kv_params(
        cls,
        huggingface_config: HuggingFaceConfig,
        n_devices: int,
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> KVCacheParams:
        """The shape of the model's cache.

        Args:
            huggingface_config: The model's config.json.
            n_devices: The number of devices.
            kv_cache_config: The options of the cache.
            cache_dtype: The cache's dtype.
        """
        ...

    @classmethod
    @abstractmethod
    def get_num_layers(cls, huggingface_config: HuggingFaceConfig) -> int:
        """The number of layers of the first cache group.

        Args:
            huggingface_config: The model's config.json.
        """
        ...

    @classmethod
    def estimate_kv_cache_size(
        cls,
        pipeline_config: PipelineConfig,
        available_cache_memory: int,
        devices: list[Device],
        huggingface_config: HuggingFaceConfig,
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> int:
        """The bytes of the cache for a full batch, at most the available memory.

        Args:
            pipeline_config: The configuration of the pipeline.
            available_cache_memory: Bytes for the cache.
            devices: Where the model runs.
            huggingface_config: The model's config.json.
            kv_cache_config: The options of the cache.
            cache_dtype: The cache's dtype.
        """
        model: Any = cls  # the protocol is mixed into a PipelineModel
        params, layers = model.cache_shape(
            pipeline_config, huggingface_config, devices, kv_cache_config, cache_dtype
        )
        full_batch = cache_bytes(
            params,
            layers,
            max_batch_size=pipeline_config.max_batch_size or 1,
            max_seq_len=model.calculate_max_seq_len(pipeline_config, huggingface_config),
            step_tokens=pipeline_config.step_tokens,
        )
        return min(available_cache_memory, full_batch)


def checked_shape(method: Callable[..., Any], params: object) -> KVCacheParams:
    """Checks what a model's `get_kv_params` returned.

    Args:
        method: The method.
        params: What it returned.

    Raises:
        TypeError: It is not the shape of one cache.
    """
    if not isinstance(params, KVCacheParams):
        raise TypeError(
            f"{method.__qualname__} returned {type(params).__name__}, expected KVCacheParams: one cache for a model"
        )
    return params


def get_paged_manager(pipeline: Pipeline[Any, Any]) -> PagedKVCacheManager | None:
    """The manager of a pipeline's KV cache; None without a cache."""
    managers = getattr(pipeline, "kv_managers", None) or []
    return next((m for m in managers if isinstance(m, PagedKVCacheManager)), None)


def load_cache(
    model: object, config: PipelineConfig, session: InferenceSession, available: int
) -> PagedKVCacheManager:
    """The KV cache of a model in the available memory.

    Args:
        model: The model.
        config: The configuration, resolved.
        session: The model's session.
        available: The bytes for the cache.

    Raises:
        TypeError: The model has no cache.
        UserError: One sequence does not fit.
    """
    if not isinstance(model, KVCacheMixin):
        raise TypeError(f"{type(model).__name__} has no KV cache: it lacks KVCacheMixin")
    try:
        return model.load_kv_manager(session, available)
    except ValueError as error:
        page, length = config.kv_cache_config.kv_cache_page_size, config.max_length
        # a page that is larger than the context is the likelier cause
        too_big = length is not None and page > length + page // 2
        option = "--kv-cache-page-size" if too_big else "--max-length"
        raise UserError(str(error), f"Give a smaller {option}.") from error
