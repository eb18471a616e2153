"""The KV cache of a pipeline's model."""

from __future__ import annotations

from typing import Any, cast

from max.engine import InferenceSession
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import UserError
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.models.kv_cache import KVCacheMixin
from max.pipelines.models.pipeline_model import PipelineModel

__all__ = ["loaded_cache"]


def loaded_cache(
    model: PipelineModel[Any], config: PipelineConfig, session: InferenceSession, available: int
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
        return cast(PagedKVCacheManager, model.load_kv_manager(session, available))
    except ValueError as error:
        page, length = config.kv_cache_config.kv_cache_page_size, config.max_length
        too_big = length is not None and page > length + page // 2
        option = "--kv-cache-page-size" if too_big else "--max-length"
        raise UserError(str(error), f"Give a smaller {option}.") from error
