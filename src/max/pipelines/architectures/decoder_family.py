"""Declares families of decoders: what their configs and checkpoints differ in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from max.graph.weights import WeightsFormat
from max.interfaces import PipelineTask
from max.nn.kv_cache.cache_params import KVCacheStrategy
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.checkpoints.gguf_families import GGUF_ARCHITECTURES
from max.pipelines.config.enums import RopeType
from max.pipelines.models.config_fields import Fields
from max.pipelines.models.decoder import Decoder
from max.pipelines.models.decoder_config import DecoderConfig
from max.pipelines.models.decoder_model import DecoderModel
from max.pipelines.models.weight_names import WeightNames
from max.pipelines.registry.architecture import SupportedArchitecture
from max.pipelines.tokenization.tokenizer import TextTokenizer

__all__ = ["decoder_family"]

_FLOATS = (SupportedEncoding.bfloat16, SupportedEncoding.float32, SupportedEncoding.float16)
_BLOCKS = (
    SupportedEncoding.q4_0,
    SupportedEncoding.q4_k,
    SupportedEncoding.q5_k,
    SupportedEncoding.q6_k,
    SupportedEncoding.q8_0,
)


def decoder_family(
    name: str,
    example_repo_ids: Sequence[str],
    fields: Callable[[Any, ConfigKeys], Fields],
    *,
    names: WeightNames | None = None,
    decoder: type[Decoder] = Decoder,
    rotates: bool = True,
    gguf_permuted: bool = False,
) -> SupportedArchitecture:
    """Declares an architecture whose models are a `Decoder`.

    Args:
        name: The class's name in ``architectures`` of config.json.
        example_repo_ids: Models of this architecture on the Hugging Face hub.
        fields: Reads the fields of `DecoderConfig` from the keys of config.json (as attributes, and with checks).
        names: The names of weights in checkpoints; by default those of Llama.
        decoder: The layers.
        rotates: Whether positions rotate heads.
        gguf_permuted: Whether the pairs that rotate together are neighbours in GGUF files, though they are half a head
            apart in others.
    """
    weight_names = WeightNames() if names is None else names

    class Config(DecoderConfig):
        @classmethod
        def fields_from(cls, config: Any, keys: ConfigKeys) -> Fields:
            return fields(config, keys)

    class Model(DecoderModel):
        config_class = Config
        decoder_class = decoder

    Model.weight_names = weight_names
    Model.gguf_interleaves_rope = gguf_permuted
    encodings = (*_FLOATS, *(_BLOCKS if name in GGUF_ARCHITECTURES else ()))
    for kind, made in (("Config", Config), ("Model", Model)):
        made.__name__ = made.__qualname__ = name.removesuffix("ForCausalLM") + kind
        made.__module__ = fields.__module__
        made.__doc__ = f"The {kind.lower()} of {name}."
    rename = weight_names.from_safetensors
    return SupportedArchitecture(
        name=name,
        example_repo_ids=list(example_repo_ids),
        default_encoding=_FLOATS[0],
        supported_encodings={encoding: [KVCacheStrategy.PAGED] for encoding in encodings},
        pipeline_model=Model,
        task=PipelineTask.TEXT_GENERATION,
        tokenizer=TextTokenizer,
        default_weights_format=WeightsFormat.safetensors,
        rope_type=RopeType.neox if rotates else RopeType.none,
        multi_gpu_supported=True,
        weight_adapters={
            WeightsFormat.safetensors: rename,
            WeightsFormat.pytorch: rename,
            WeightsFormat.gguf: weight_names.from_gguf,
        },
    )
