"""Declares architectures that are a `DecoderModel` with float weights in safetensors files."""

from __future__ import annotations

from max.graph.weights import WeightsFormat
from max.interfaces import PipelineTask
from max.nn.kv_cache.cache_params import KVCacheStrategy
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.config.enums import RopeType
from max.pipelines.models.decoder_model import DecoderModel
from max.pipelines.registry.architecture import SupportedArchitecture
from max.pipelines.tokenization.tokenizer import TextTokenizer

__all__ = ["float_decoder"]

_FLOATS = (SupportedEncoding.bfloat16, SupportedEncoding.float32, SupportedEncoding.float16)


def float_decoder(
    name: str, pipeline_model: type[DecoderModel], example_repo_ids: list[str]
) -> SupportedArchitecture:
    """Declares an architecture.

    Args:
        name: The class's name in ``architectures`` of config.json.
        pipeline_model: The model's class.
        example_repo_ids: Models of this architecture on the Hugging Face hub.
    """
    rename = pipeline_model.weight_names.from_safetensors
    return SupportedArchitecture(
        name=name,
        example_repo_ids=example_repo_ids,
        default_encoding=_FLOATS[0],
        supported_encodings={encoding: [KVCacheStrategy.PAGED] for encoding in _FLOATS},
        pipeline_model=pipeline_model,
        task=PipelineTask.TEXT_GENERATION,
        tokenizer=TextTokenizer,
        default_weights_format=WeightsFormat.safetensors,
        rope_type=RopeType.neox,
        weight_adapters={WeightsFormat.safetensors: rename, WeightsFormat.pytorch: rename},
    )
