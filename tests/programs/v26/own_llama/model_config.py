from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import KVCacheParams
from max.pipelines.lib import (
    MAXModelConfig,
    PipelineConfig,
    supported_encoding_dtype,
    upper_bounded_default,
)
from max.pipelines.lib.interfaces import ArchConfigWithKVCache


@dataclass(kw_only=True)
class OwnLlamaConfig(ArchConfigWithKVCache):
    DEFAULT_ENCODING: ClassVar[str] = "float32"
    SUPPORTED_ENCODINGS: ClassVar[set[str]] = {"float32", "bfloat16"}

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    num_layers: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_seq_len: int
    dtype: DType
    devices: list[DeviceRef]
    kv_params: KVCacheParams

    def get_kv_params(self) -> KVCacheParams:
        return self.kv_params

    def get_max_seq_len(self) -> int:
        return self.max_seq_len

    @classmethod
    def calculate_max_seq_len(cls, huggingface_config: Any, model_config: MAXModelConfig) -> int:
        return upper_bounded_default(
            upper_bound=huggingface_config.max_position_embeddings, default=model_config.max_length
        )

    @classmethod
    def construct_kv_params(
        cls,
        huggingface_config: Any,
        pipeline_config: PipelineConfig,
        devices,
        kv_cache_config,
        cache_dtype: DType,
    ) -> KVCacheParams:
        heads = huggingface_config.num_attention_heads
        return kv_cache_config.to_params(
            dtype=cache_dtype,
            n_kv_heads=huggingface_config.num_key_value_heads,
            head_dim=huggingface_config.hidden_size // heads,
            num_layers=huggingface_config.num_hidden_layers,
            devices=devices,
            data_parallel_degree=pipeline_config.model.data_parallel_degree,
        )

    @classmethod
    def initialize(
        cls,
        pipeline_config: PipelineConfig,
        model_config: MAXModelConfig | None = None,
        *,
        max_seq_len: int,
    ) -> OwnLlamaConfig:
        model_config = model_config or pipeline_config.model
        config = model_config.huggingface_config
        assert model_config.quantization_encoding is not None
        dtype = supported_encoding_dtype(model_config.quantization_encoding)
        devices = [DeviceRef(spec.device_type, spec.id) for spec in model_config.device_specs]
        return cls(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            num_layers=config.num_hidden_layers,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_parameters["rope_theta"],
            max_seq_len=max_seq_len,
            dtype=dtype,
            devices=devices,
            kv_params=cls.construct_kv_params(
                config, pipeline_config, devices, model_config.kv_cache, dtype
            ),
        )
