"""The ``model_type`` of config.json: the class that it stands for, and the keys that files of the type leave out.

`config_defaults.json` has, for each type, the defaults and the second names of keys of transformers' config class,
`other_model_types.json` the kinds of models that do not run here; ``python -m tests.architectures.config_defaults``
writes both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from max._host.process_caches import cached_results
from max.pipelines.checkpoints.config_keys import ConfigKeys

__all__ = [
    "CLASS_ALIASES",
    "ModelType",
    "class_of",
    "other_kind",
    "type_of_class",
    "with_type",
    "with_type_of",
]

CLASS_ALIASES = {
    **dict.fromkeys(
        (
            *("AquilaForCausalLM", "AquilaModel", "ExaoneForCausalLM", "IQuestCoderForCausalLM"),
            *("InternLMForCausalLM", "InternLM3ForCausalLM", "LLaMAForCausalLM"),
            *("XverseForCausalLM", "YiForCausalLM"),
        ),
        "LlamaForCausalLM",
    ),
    "MPTForCausalLM": "MptForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "RWForCausalLM": "FalconForCausalLM",
    "SarvamMLAForCausalLM": "DeepseekV3ForCausalLM",
    "SarvamMoEForCausalLM": "Glm4MoeForCausalLM",
    "StableLMEpochForCausalLM": "StableLmForCausalLM",
    "StableLmEpochForCausalLM": "StableLmForCausalLM",
}
"""The classes of models' own code, and the classes with the same layers."""

_REFINED_WEB = {
    "class": "FalconForCausalLM",
    "keys": {"multi_query": False, "parallel_attn": False, "layer_norm_epsilon": 1e-5},
    "names": {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
    },
}
_TYPES_OF_OWN_CODE: dict[str, dict[str, Any]] = {
    "internlm": {
        "class": "LlamaForCausalLM",
        "keys": {"attention_bias": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        "names": {"bias": "attention_bias"},
    },
    # its config class is a Qwen2Config
    "mimo": {
        "class": "MiMoForCausalLM",
        "keys": {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "rope_theta": 10000.0,
            "num_nextn_predict_layers": 0,
        },
    },  # fmt: skip
    "RefinedWeb": {
        **_REFINED_WEB,
        "keys": {**_REFINED_WEB["keys"], "new_decoder_architecture": True},
    },
    "RefinedWebModel": _REFINED_WEB,
    "stablelm_epoch": {
        "class": "StableLmForCausalLM",
        "keys": {"layer_norm_eps": 1e-5, "max_position_embeddings": 4096},
        "names": {"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"},
    },
}
"""Types that transformers has no class for: those of models' own code."""


class ModelType(NamedTuple):
    """What transformers' config class of a type says.

    Args:
        class_name: The class of the model in ``architectures``.
        defaults: The values of keys that a file leaves out.
        names: All names of the keys that have several, each list with the one that counts first.
    """

    class_name: str
    defaults: Mapping[str, Any]
    names: Mapping[str, tuple[str, ...]]


@cached_results()
def _table() -> dict[str, dict[str, Any]]:
    path = Path(__file__).with_name("config_defaults.json")
    return {**json.loads(path.read_text(encoding="utf-8")), **_TYPES_OF_OWN_CODE}


@cached_results(256)
def _type(model_type: str) -> ModelType | None:
    entry = _table().get(model_type)
    if entry is None:
        return None
    groups: dict[str, list[str]] = {}
    for second, first in entry.get("names", {}).items():
        groups.setdefault(first, []).append(second)
    names = {name: (*group, first) for first, group in groups.items() for name in (*group, first)}
    return ModelType(entry["class"], MappingProxyType(entry.get("keys", {})), names)


def class_of(model_type: object) -> str | None:
    """The class that transformers loads for a type; None if it does not run here.

    Args:
        model_type: The value of the key ``model_type``, of any type.
    """
    known = _type(model_type) if isinstance(model_type, str) else None
    return None if known is None else known.class_name


@cached_results(256)
def type_of_class(class_name: str) -> str | None:
    """The type of a class of models: that of the same name where several types have the class.

    Args:
        class_name: The name in ``architectures``.
    """
    fitting = [kind for kind, entry in _table().items() if entry["class"] == class_name]
    stem = class_name.lower()
    named = (
        kind for kind in fitting if stem.startswith(kind.removesuffix("_text").replace("_", ""))
    )
    return max(named, key=len, default=fitting[0] if fitting else None)


def with_type(keys: ConfigKeys, class_name: str) -> ConfigKeys:
    """The keys of a config.json with the defaults and the second names of its type.

    The type is the file's, or that of the class if the file has none, or one that runs here under another class.

    Args:
        keys: The keys. Those of a GGUF file are complete and returned unchanged.
        class_name: The class of the model.
    """
    if keys.value("from_gguf"):
        return keys
    class_name = CLASS_ALIASES.get(class_name, class_name)
    stated = keys.value("model_type")
    same = isinstance(stated, str) and class_of(stated) == class_name
    kind = stated if same else type_of_class(class_name)
    known = None if kind is None else _type(kind)
    return keys if known is None else keys.of_type(known.defaults, known.names)


def with_type_of(keys: ConfigKeys, kinds: Sequence[str]) -> ConfigKeys:
    """The keys of a config.json with the defaults and the second names of its type, if it is one of some.

    Args:
        keys: The keys.
        kinds: The types; the first counts if the file states none of them. Without any the keys are unchanged.
    """
    stated = keys.value("model_type")
    known = _type(stated if stated in kinds else kinds[0]) if kinds else None
    return keys if known is None else keys.of_type(known.defaults, known.names)


_KINDS = {
    "encoder-decoder": "an encoder-decoder",
    "audio": "a model of audio",
    "video": "a model of video",
    "images": "a model of images",
    "media": "a model of images and audio",
    "time series": "a model of time series",
    "encoder": "an encoder of a family that does not run here",
    "decoder": "a decoder of a family that does not run here",
}


@cached_results()
def _other_types() -> dict[str, str]:
    """The kinds of types that do not run here, by the type without ``_`` and ``-``."""
    path = Path(__file__).with_name("other_model_types.json")
    kinds: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return {_squeezed_name(name): kind for kind, names in kinds.items() for name in names.split()}


def _squeezed_name(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def family_and_task(class_name: str) -> tuple[str, str]:
    """The family and the task in the name of a class: ``Llama`` and ``ForCausalLM``.

    Args:
        class_name: The name in ``architectures``.
    """
    task = re.search("(For[A-Z].*|LMHeadModel|Model)$", class_name)
    end = len(class_name) if task is None else task.start()
    return class_name[:end], class_name[end:]


def other_kind(model_type: object, class_names: Sequence[str]) -> str | None:
    """What a model is that does not run here, by its type or else its classes; None if that is unknown.

    Args:
        model_type: The value of the key ``model_type``, of any type.
        class_names: The names in ``architectures``.
    """
    types = _other_types()
    named = [model_type] if isinstance(model_type, str) else []
    named += [family_and_task(name)[0] for name in class_names]
    for name in map(_squeezed_name, named):
        # LlavaLlama and its kind: the family comes first
        longer = (known for known in types if len(known) > 4 and name.startswith(known))
        # versions of a family have numbers
        exact = next((each for each in (name, name.rstrip("0123456789")) if each in types), None)
        found = exact or max(longer, key=len, default="")
        if found:
            return _KINDS[types[found]]
    return None
