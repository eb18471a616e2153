"""Composite checkpoints: a text model combined with image and audio models; reads the text model's config and
weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core.exceptions import WeightsError

__all__ = [
    "COMPOSITES",
    "text_class",
    "text_config",
    "text_model_type",
    "text_weight_name",
    "text_weights",
]

T = TypeVar("T")

COMPOSITES: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma3nForConditionalGeneration": {"gemma3n_text": "Gemma3nForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Lfm2VlForConditionalGeneration": {"lfm2": "Lfm2ForCausalLM"},
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": "Qwen2ForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2ForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}
"""Maps each composite class to the classes of its text model, by the ``model_type`` of text_config.

The first entry applies to a text_config without a ``model_type``.
"""

_TIED = ("gemma3_text", "gemma3n_text", "gemma4_text", "lfm2", "mistral", "ministral3")
"""The types whose composite classes tie the output layer if neither config states it."""

_TOP_KEYS = ("tie_word_embeddings", "quantization_config")
"""Keys that are also read from the top level of a composite config.json."""

_OTHER_PARTS = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
)
"""Prefixes of the names of image and audio weights, after an optional ``model.``."""

_TEXT_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.")
"""Prefixes of the names of the text model's weights, which replace its own ``model.``."""


def text_model_type(config: HuggingFaceConfig, name: str) -> str:
    """The ``model_type`` of the text model of a composite config.json.

    Args:
        config: The config.json.
        name: The composite class, a key of `COMPOSITES`.

    Raises:
        ModelFilesError: The file has no text_config, or its ``model_type`` is not a type of the class.
    """
    keys, kinds = ConfigKeys(config), tuple(COMPOSITES[name])
    section = keys.object("text_config")
    if section is None and _is_flat(config):
        return kinds[0]
    if section is None:
        raise keys.error("text_config", f"the config of the text model of {name}")
    return section.choice("model_type", kinds, kinds[0])


def text_config(config: HuggingFaceConfig, name: str) -> HuggingFaceConfig:
    """The text model's config from a composite config.json.

    Keys that it leaves out have the defaults of its type where they are read (`model_types.with_type`).

    Args:
        config: The config.json.
        name: The composite class, a key of `COMPOSITES`.

    Raises:
        ModelFilesError: The file has no text_config, or its ``model_type`` is not a type of the class.
    """
    kind = text_model_type(config, name)
    top = config.to_dict()
    top_keys = {key: top[key] for key in _TOP_KEYS if top.get(key) is not None}
    text = top if _is_flat(config) else top["text_config"]
    defaults = {"tie_word_embeddings": kind in _TIED}
    text_keys = {key: value for key, value in text.items() if key != "rope_parameters"}
    # earlier files use the second key; null leaves the default
    rotation = text.get("rope_parameters") or text.get("rope_scaling")
    if rotation:
        text_keys["rope_parameters"] = rotation
    text_keys |= {"model_type": kind, "architectures": [COMPOSITES[name][kind]], **top_keys}
    source = config.source if text is top else f"text_config of {config.source}"
    return HuggingFaceConfig(defaults | text_keys, source)


def _is_flat(config: HuggingFaceConfig) -> bool:
    """Whether a file has the text model's keys at its top level, as Qwen 2-VL's before transformers 4.52."""
    return config.get("text_config") is None and config.get("hidden_size") is not None


def text_class(config: HuggingFaceConfig, name: str) -> str:
    """The class of the text model of a composite class; other classes are returned unchanged.

    Args:
        config: The config.json.
        name: The name of a class in ``architectures``.

    Raises:
        ModelFilesError: As `text_model_type`.
    """
    return COMPOSITES[name][text_model_type(config, name)] if name in COMPOSITES else name


def text_weight_name(stored_name: str) -> str | None:
    """The name of a weight of a composite checkpoint in checkpoints of the text model; None for weights of other parts.

    Args:
        stored_name: The name. A name without a known prefix is returned unchanged.
    """
    if stored_name.removeprefix("model.").startswith(_OTHER_PARTS):
        return None
    # the output layer stands outside of the text model in some checkpoints
    if stored_name.startswith("language_model.lm_head."):
        stored_name = stored_name.removeprefix("language_model.")
    prefix = next(filter(stored_name.startswith, _TEXT_PREFIXES), None)
    return stored_name if prefix is None else f"model.{stored_name.removeprefix(prefix)}"


def text_weights(weights: Mapping[str, T]) -> dict[str, T]:
    """The weights of the text model, by the names in its own checkpoints; weights of other parts are left out.

    Args:
        weights: The weights of a composite checkpoint; their data is not read.

    Raises:
        WeightsError: There are weights, but none of the text model.
    """
    text_weights: dict[str, T] = {}
    for stored, weight in weights.items():
        name = text_weight_name(stored)
        if name is not None:
            text_weights[name] = weight
    # an empty file is reported by what reads the weights
    if weights and not text_weights:
        raise WeightsError(
            f"the files have weights of images or audio alone ({next(iter(weights))!r}, …), expected those of the text "
            f"model, as {'model.language_model.embed_tokens.weight'!r}"
        )
    return text_weights
