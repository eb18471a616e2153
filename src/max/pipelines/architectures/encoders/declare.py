"""Declares the architectures of a family of encoders."""

from __future__ import annotations

from collections.abc import Sequence

from max.graph.weights import WeightsFormat
from max.interfaces import PipelineTask
from max.nn.kv_cache.cache_params import KVCacheStrategy
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.encoders.context import EncoderTokenizer
from max.pipelines.encoders.encoder_model import EncoderModel
from max.pipelines.registry.architecture import SupportedArchitecture

__all__ = ["encoders"]

_FLOATS = (SupportedEncoding.float32, SupportedEncoding.bfloat16, SupportedEncoding.float16)


def encoders(
    names: Sequence[str], pipeline_model: type[EncoderModel], example_repo_ids: list[str]
) -> list[SupportedArchitecture]:
    """Declares an architecture for each name.

    Args:
        names: The classes' names in ``architectures`` of config.json.
        pipeline_model: The model's class.
        example_repo_ids: Models of the family on the Hugging Face hub.
    """
    rename = pipeline_model.weight_names.from_safetensors
    return [
        SupportedArchitecture(
            name=name,
            example_repo_ids=example_repo_ids,
            default_encoding=_FLOATS[0],
            # encoders have no cache; configurations name the strategy that is the default
            supported_encodings={encoding: [KVCacheStrategy.PAGED] for encoding in _FLOATS},
            pipeline_model=pipeline_model,
            task=PipelineTask.EMBEDDINGS_GENERATION,
            tokenizer=EncoderTokenizer,
            default_weights_format=WeightsFormat.safetensors,
            weight_adapters={WeightsFormat.safetensors: rename, WeightsFormat.pytorch: rename},
        )
        for name in names
    ]
