"""The configs of architectures of 26.x: classes that read a `PipelineConfig` (`SupportedArchitecture(config=…)`).

An architecture derives a dataclass from one of them, and defines the missing members.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache.cache_params import KVCacheParams
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.model_config import MAXModelConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.models.pipeline_model import upper_bounded_default

__all__ = [
    "ArchConfig",
    "ArchConfigWithAttentionKVCache",
    "ArchConfigWithBoundedMaxSeqLen",
    "ArchConfigWithKVCache",
    "ArchConfigWithPermissiveMaxSeqLen",
    "ArchConfigWithStoredKVParams",
]


def _lacks(cls: type[Any], method: str) -> NotImplementedError:
    return NotImplementedError(f"{cls.__name__} does not define {method}")


def _configured_length(model_config: Any) -> int | None:
    """The ``max_length`` of a model, an attribute of 26.x."""
    return model_config.max_length


class ArchConfig:
    """The config of an architecture."""

    @classmethod
    def initialize(
        cls,
        pipeline_config: PipelineConfig,
        model_config: MAXModelConfig | None = None,
        *,
        max_seq_len: int,
    ) -> Self:
        """Reads the config of a model.

        Args:
            pipeline_config: The configuration of the pipeline, resolved.
            model_config: The model; None: that of `pipeline_config`.
            max_seq_len: The longest sequence to serve.

        Raises:
            NotImplementedError: A subclass has to define it.
        """
        raise _lacks(cls, "initialize")

    @classmethod
    def calculate_max_seq_len(
        cls, huggingface_config: HuggingFaceConfig, model_config: MAXModelConfig
    ) -> int:
        """The configured ``max_length``, at most what the model supports.

        Args:
            huggingface_config: The model's config.json.
            model_config: The model, with the configured ``max_length``.

        Raises:
            NotImplementedError: A subclass has to define it.
        """
        raise _lacks(cls, "calculate_max_seq_len")

    def get_max_seq_len(self) -> int:
        """The longest sequence to serve.

        Raises:
            NotImplementedError: The config has no `max_seq_len`, and does not define this method.
        """
        length = getattr(self, "max_seq_len", None)
        if length is None:
            raise _lacks(type(self), "get_max_seq_len")
        return length


class ArchConfigWithKVCache(ArchConfig):
    """The config of an architecture with a KV cache."""

    def get_kv_params(self) -> KVCacheParams:
        """The shape of the cache.

        Raises:
            NotImplementedError: A subclass has to define it.
        """
        raise _lacks(type(self), "get_kv_params")


class ArchConfigWithBoundedMaxSeqLen:
    """For configs whose longest sequence is ``max_position_embeddings`` of config.json, or shorter."""

    @classmethod
    def calculate_max_seq_len(
        cls, huggingface_config: HuggingFaceConfig, model_config: MAXModelConfig
    ) -> int:
        """The configured ``max_length``, at most ``max_position_embeddings``.

        Args:
            huggingface_config: The model's config.json.
            model_config: The model, with the configured ``max_length``.

        Raises:
            ValueError: ``max_length`` is more.
        """
        longest = huggingface_config.max_position_embeddings
        return upper_bounded_default(upper_bound=longest, default=_configured_length(model_config))

    def get_max_seq_len(self) -> int:
        """The longest sequence to serve."""
        return self.max_seq_len  # type: ignore[attr-defined]


class ArchConfigWithPermissiveMaxSeqLen(ArchConfigWithBoundedMaxSeqLen):
    """For configs that take any ``max_length``."""

    @classmethod
    def calculate_max_seq_len(
        cls, huggingface_config: HuggingFaceConfig, model_config: MAXModelConfig
    ) -> int:
        """The configured ``max_length``; without one ``max_position_embeddings``.

        Args:
            huggingface_config: The model's config.json.
            model_config: The model, with the configured ``max_length``.
        """
        return _configured_length(model_config) or huggingface_config.max_position_embeddings


class ArchConfigWithStoredKVParams(ArchConfigWithBoundedMaxSeqLen):
    """For configs with a field ``kv_params``."""

    @staticmethod
    def get_head_dim(huggingface_config: HuggingFaceConfig) -> int:
        """The size of a head: ``head_dim`` of config.json, else the hidden size divided by the heads.

        Args:
            huggingface_config: The model's config.json.
        """
        stated = getattr(huggingface_config, "head_dim", None)
        return stated or huggingface_config.hidden_size // huggingface_config.num_attention_heads

    @staticmethod
    def get_num_layers(huggingface_config: HuggingFaceConfig) -> int:
        """The number of layers.

        Args:
            huggingface_config: The model's config.json.
        """
        return huggingface_config.num_hidden_layers

    @classmethod
    def construct_kv_params(
        cls,
        huggingface_config: HuggingFaceConfig,
        pipeline_config: PipelineConfig,
        devices: Sequence[DeviceRef],
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> KVCacheParams:
        """The shape of the cache, for attention with grouped heads.

        Args:
            huggingface_config: The model's config.json.
            pipeline_config: The configuration of the pipeline.
            devices: Where the model runs.
            kv_cache_config: The options of the cache.
            cache_dtype: The cache's dtype.
        """
        heads = huggingface_config.num_attention_heads
        return kv_cache_config.to_params(
            dtype=cache_dtype,
            n_kv_heads=getattr(huggingface_config, "num_key_value_heads", None) or heads,
            head_dim=cls.get_head_dim(huggingface_config),
            num_layers=cls.get_num_layers(huggingface_config),
            devices=devices,
            data_parallel_degree=pipeline_config.model_config.data_parallel_degree,
        )

    def get_kv_params(self) -> KVCacheParams:
        """The field ``kv_params``."""
        return self.kv_params  # type: ignore[attr-defined]


@dataclass
class ArchConfigWithAttentionKVCache(ArchConfigWithKVCache):
    """A config that is ready but for the shape of the cache.

    A subclass defines the properties ``num_key_value_heads``, ``head_dim`` and ``num_layers``; and
    ``calculate_max_seq_len`` or, as earlier, ``model_max_seq_len``.

    Args:
        dtype: The dtype of the weights.
        max_seq_len: The longest sequence to serve.
        devices: Where the model runs.
        cache_dtype: The dtype of the cache; None: that of the weights.
        quantization_encoding: The encoding of the weights.
        kv_cache: The options of the cache.
        data_parallel_degree: The copies of the model.
        huggingface_config: The model's config.json.
    """

    dtype: DType
    max_seq_len: int
    devices: list[DeviceRef] = field(default_factory=lambda: [DeviceRef.CPU()])
    cache_dtype: DType | None = None
    quantization_encoding: SupportedEncoding | None = None
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    data_parallel_degree: int = 1
    huggingface_config: Any = None

    @property
    @abstractmethod
    def num_key_value_heads(self) -> int:
        """The number of KV heads."""
        raise _lacks(type(self), "num_key_value_heads")

    @property
    @abstractmethod
    def head_dim(self) -> int:
        """The size of a head."""
        raise _lacks(type(self), "head_dim")

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """The number of layers."""
        raise _lacks(type(self), "num_layers")

    @classmethod
    def initialize(
        cls,
        pipeline_config: PipelineConfig,
        model_config: MAXModelConfig | None = None,
        *,
        max_seq_len: int,
    ) -> Self:
        """Reads the config of a model; see `ArchConfig.initialize`.

        Args:
            pipeline_config: The configuration of the pipeline, resolved.
            model_config: The model; None: that of `pipeline_config`.
            max_seq_len: The longest sequence to serve.

        Raises:
            ValueError: The encoding is not known yet.
        """
        model = pipeline_config.model_config if model_config is None else model_config
        encoding = model.quantization_encoding
        if encoding is None:
            raise ValueError(
                f"{cls.__name__}: quantization_encoding is not set; resolve the config"
            )
        return cls(
            dtype=encoding.dtype,
            max_seq_len=max_seq_len,
            devices=[DeviceRef(spec.device_type, spec.id) for spec in model.device_specs],
            cache_dtype=model.kv_cache_config.cache_dtype(encoding.cache_dtype),
            quantization_encoding=encoding,
            kv_cache=model.kv_cache_config,
            data_parallel_degree=model.data_parallel_degree,
            huggingface_config=model.huggingface_config,
        )

    @classmethod
    def calculate_max_seq_len(
        cls, huggingface_config: HuggingFaceConfig, model_config: MAXModelConfig
    ) -> int:
        """The configured ``max_length``, at most ``model_max_seq_len`` or ``max_position_embeddings``.

        Args:
            huggingface_config: The model's config.json.
            model_config: The model, with the configured ``max_length``.

        Raises:
            ValueError: ``max_length`` is more.
        """
        if hasattr(cls, "model_max_seq_len"):  # a property that reads config.json
            config: Any = cls(DType.float32, 0, huggingface_config=huggingface_config)
            longest = config.model_max_seq_len
        else:
            longest = huggingface_config.max_position_embeddings
        return upper_bounded_default(upper_bound=longest, default=_configured_length(model_config))

    def get_kv_params(self) -> KVCacheParams:
        """The shape of the cache."""
        return self.kv_cache.to_params(
            dtype=self.cache_dtype or self.dtype,
            n_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            num_layers=self.num_layers,
            devices=self.devices,
            data_parallel_degree=self.data_parallel_degree,
        )
