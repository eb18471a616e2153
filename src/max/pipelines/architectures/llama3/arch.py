"""Llama's entries for the registry."""

from __future__ import annotations

from max.graph.weights import WeightsFormat
from max.interfaces import PipelineTask
from max.nn.kv_cache.cache_params import KVCacheStrategy
from max.pipelines.architectures.llama3.model import Llama3Model
from max.pipelines.architectures.llama3.weight_adapters import (
    convert_gguf_state_dict,
    convert_safetensor_state_dict,
)
from max.pipelines.checkpoints.encodings import BLOCK_ENCODINGS, SupportedEncoding
from max.pipelines.config.enums import RopeType
from max.pipelines.registry.architecture import SupportedArchitecture
from max.pipelines.tokenization.tokenizer import TextTokenizer

__all__ = ["ARCHITECTURES", "llama_arch"]

_PAGED = [KVCacheStrategy.PAGED]

llama_arch = SupportedArchitecture(
    name="LlamaForCausalLM",
    example_repo_ids=[
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
    ],
    default_encoding=SupportedEncoding.float32,
    supported_encodings={
        SupportedEncoding.float32: _PAGED,
        SupportedEncoding.bfloat16: _PAGED,
        SupportedEncoding.float16: _PAGED,
        **dict.fromkeys(BLOCK_ENCODINGS, _PAGED),
        SupportedEncoding.gptq: _PAGED,
    },
    pipeline_model=Llama3Model,
    task=PipelineTask.TEXT_GENERATION,
    tokenizer=TextTokenizer,
    default_weights_format=WeightsFormat.safetensors,
    multi_gpu_supported=True,
    rope_type=RopeType.neox,
    weight_adapters={
        WeightsFormat.safetensors: convert_safetensor_state_dict,
        WeightsFormat.pytorch: convert_safetensor_state_dict,
        WeightsFormat.gguf: convert_gguf_state_dict,
    },
)
"""All models of the class ``LlamaForCausalLM``."""

ARCHITECTURES = [llama_arch]
"""The architectures of this package, for the registry."""
