"""Declares families of decoders by the differences of their configs and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from max.graph.weights import WeightData, WeightsFormat
from max.interfaces import PipelineTask
from max.nn.kv_cache.cache_params import KVCacheStrategy
from max.pipelines.checkpoints.composite_config import text_config, text_weights
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.encodings import BLOCK_ENCODINGS, SupportedEncoding
from max.pipelines.checkpoints.model_types import with_type
from max.pipelines.config.enums import RopeType
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.tensor_names import decoder_weights
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.decoder import Decoder
from max.pipelines.models.decoder.model import DecoderModel
from max.pipelines.models.decoder.weight_names import WeightNames
from max.pipelines.registry.architecture import SupportedArchitecture
from max.pipelines.tokenization.tokenizer import TextTokenizer

__all__ = ["composite_family", "decoder_family"]

T = TypeVar("T")

_FLOATS = (SupportedEncoding.bfloat16, SupportedEncoding.float32, SupportedEncoding.float16)


def decoder_family(
    name: str,
    example_repo_ids: Sequence[str],
    shape: Callable[[ConfigKeys], DecoderConfig],
    *,
    names: WeightNames | None = None,
    decoder: type[Decoder] = Decoder,
    rotates: bool = True,
    gguf: GGUFForm | tuple[GGUFForm, ...] = (),
) -> SupportedArchitecture:
    """Declares an architecture whose models are a `Decoder`.

    Args:
        name: The class's name in ``architectures`` of config.json.
        example_repo_ids: Models of this architecture on the Hugging Face hub.
        shape: Reads the blocks and what surrounds them from the keys of config.json.
        names: The names of weights in checkpoints; by default those of Llama.
        decoder: The layers.
        rotates: Whether positions rotate heads.
        gguf: The form of the family in GGUF files, or several; none: its GGUF files do not run without a config.json.
    """
    weight_names = WeightNames() if names is None else names

    class Config(DecoderConfig):
        @classmethod
        def read(cls, keys: ConfigKeys) -> DecoderConfig:
            return shape(with_type(keys, name))

    class Model(DecoderModel):
        config_class = Config
        decoder_class = decoder

    Model.weight_names = weight_names
    forms = gguf if isinstance(gguf, tuple) else (gguf,)
    Model.gguf = tuple(replace(form, class_name=form.class_name or name) for form in forms)
    encodings = (*_FLOATS, *(BLOCK_ENCODINGS if forms else ()))
    _name_classes(name, name.removesuffix("ForCausalLM"), shape.__module__, Config, Model)
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
            WeightsFormat.gguf: partial(_gguf_weights, forms[0] if forms else GGUFForm("", "")),
        },
    )


def composite_family(
    name: str, example_repo_ids: Sequence[str], texts: Mapping[str, SupportedArchitecture]
) -> SupportedArchitecture:
    """Declares an architecture that combines a text model of `decoder_family` with image and audio models.

    Only the text model runs; the weights of other parts are not read.

    Args:
        name: The class's name in ``architectures`` of config.json, a key of `COMPOSITES`.
        example_repo_ids: Models of this architecture on the Hugging Face hub.
        texts: The text model's architecture by the ``model_type`` of its config.

    Raises:
        ValueError: The text models differ in more than their configs.
    """
    first, *others = texts.values()
    base: Any = first.pipeline_model
    configs: dict[str, type[DecoderConfig]] = {}
    for kind, text in texts.items():
        model: Any = text.pipeline_model
        configs[kind] = model.config_class
        for attribute in ("decoder_class", "weight_names"):
            if getattr(model, attribute) != getattr(base, attribute):
                raise ValueError(f"{name}: the text models differ in {attribute}")

    class Config(DecoderConfig):
        @classmethod
        def read(cls, keys: ConfigKeys) -> DecoderConfig:
            own = text_config(keys.config, name)
            return configs[own.model_type].read(ConfigKeys(own))

    class Model(base):
        config_class = Config

        @classmethod
        def own_weights(cls, weights: Mapping[str, T]) -> dict[str, T]:
            return text_weights(weights)

    _name_classes(name, name.removesuffix("ForConditionalGeneration"), __name__, Config, Model)
    return replace(first, name=name, example_repo_ids=list(example_repo_ids), pipeline_model=Model)


def _gguf_weights(
    form: GGUFForm, state_dict: Mapping[str, Any], **kwargs: object
) -> dict[str, WeightData]:
    """The weight adapter of GGUF files."""
    return decoder_weights(form, state_dict)


def _name_classes(
    name: str, stem: str, module: str, config: type[DecoderConfig], model: type[DecoderModel]
) -> None:
    """Derives the names of an architecture's classes of configs and models from its name."""
    for kind, declared in (("Config", config), ("Model", model)):
        declared.__name__ = declared.__qualname__ = stem + kind
        declared.__module__ = module
        declared.__doc__ = f"The {kind.lower()} of {name}."
