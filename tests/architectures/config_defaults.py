"""Writes two files of `max.pipelines.checkpoints`, from the installed version of transformers.

`config_defaults.json` has what its config classes say of keys that a config.json leaves out, `other_model_types.json`
the kinds of the models that do not run here. ``python -m tests.architectures.config_defaults`` writes both.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from max.pipelines.architectures.index import OWN_ARCHITECTURES
from max.pipelines.checkpoints import model_types
from max.pipelines.checkpoints.composite_config import COMPOSITES

VERSION = "5.24"
"""The version of transformers that the files are of."""
FILE = Path(model_types.__file__).with_name("config_defaults.json")
OTHERS_FILE = FILE.with_name("other_model_types.json")
_TASKS = {
    "audio": "SPEECH_SEQ_2_SEQ CTC RNNT TDT AUDIO_CLASSIFICATION AUDIO_FRAME_CLASSIFICATION AUDIO_XVECTOR"
    " TEXT_TO_SPECTROGRAM TEXT_TO_WAVEFORM",
    "encoder-decoder": "SEQ_TO_SEQ_CAUSAL_LM",
    "video": "VIDEO_CLASSIFICATION",
    "images": "IMAGE_TEXT_TO_TEXT IMAGE_CLASSIFICATION IMAGE ZERO_SHOT_IMAGE_CLASSIFICATION"
    " ZERO_SHOT_OBJECT_DETECTION OBJECT_DETECTION DEPTH_ESTIMATION INSTANCE_SEGMENTATION SEMANTIC_SEGMENTATION"
    " UNIVERSAL_SEGMENTATION IMAGE_SEGMENTATION MASK_GENERATION MASKED_IMAGE_MODELING KEYPOINT_DETECTION"
    " KEYPOINT_MATCHING IMAGE_TO_IMAGE IMAGE_MATTING POSE_ESTIMATION NORMAL_ESTIMATION POINTMAP_ESTIMATION"
    " DOCUMENT_QUESTION_ANSWERING VISUAL_QUESTION_ANSWERING CAUSAL_IMAGE_MODELING TABLE_RECOGNITION TEXT_RECOGNITION"
    " BACKBONE",
    "media": "MULTIMODAL_LM",
    "time series": "TIME_SERIES_CLASSIFICATION TIME_SERIES_PREDICTION TIME_SERIES_REGRESSION",
    "encoder": "MASKED_LM",
    "decoder": "CAUSAL_LM",
}
"""The kinds of models by transformers' mappings; the first that has a type counts."""
_UNUSED = re.compile(
    "drop|_token_id$|initializer|^init_|^use_cache|aux_loss|z_loss|jitter|^output_|pretraining_tp|^summary_"
    "|scalar_init|^use_mambapy|^use_mamba_kernels|^use_bfloat16|_std$|^fp32_residual|^ep_size|_floor$|^use_associative"
    "|^rescale_|^vision|^audio|^return_dict|_attn_implementation|^use_mem_rope|^chunk_size_feed|^ffn_config"
)
"""Keys that no text model's graph depends on."""


def types() -> dict[str, str]:
    """The class of the decoder or encoder of each model type that runs, by transformers' mappings."""
    own = {name for names in OWN_ARCHITECTURES.values() for name in names}
    found = {
        kind: name
        for mapping in (MODEL_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        for kind, name in mapping.items()
        if name in own
    }
    texts = {kind: text for kinds in COMPOSITES.values() for kind, text in kinds.items()}
    composites = {
        kind: name
        for kind, name in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
        if name in COMPOSITES
    }
    return texts | found | composites


def defaults_of(kind: str) -> dict[str, Any]:
    """The values of the keys that a file of a type may leave out; null and the base class's are left out."""
    cls = CONFIG_MAPPING[kind]
    made = cls()
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        plain = isinstance(default, (bool, int, float, str, list, tuple, dict))
        if plain and not _UNUSED.search(field.name) and field.name not in _BASE:
            values[field.name] = default
    rotation = getattr(made, "rope_parameters", None)
    if hasattr(made, "rope_parameters") and isinstance(cls.default_theta, float | int):
        values["rope_theta"] = values.get("rope_theta", cls.default_theta)
    if isinstance(rotation, dict):
        if "partial_rotary_factor" in rotation:
            values["partial_rotary_factor"] = rotation["partial_rotary_factor"]
        # what the class itself fills in, such as CWM's scaling; GPT-OSS takes the file's base for it
        if {*rotation} - {"rope_type", "rope_theta", "partial_rotary_factor"}:
            given = cls(rope_theta=12345.0).rope_parameters
            own = {key: value for key, value in rotation.items() if given.get(key) == value}
            values["rope_parameters"] = own
    return values


_BASE = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}


def expected() -> dict[str, Any]:
    """The contents of the file."""
    table: dict[str, Any] = {}
    for kind, name in sorted(types().items()):
        table[kind] = {"class": name}
        if name not in COMPOSITES:
            table[kind]["keys"] = defaults_of(kind)
            if renamed := CONFIG_MAPPING[kind].attribute_map:
                table[kind]["names"] = dict(renamed)
    return json.loads(json.dumps(table))


def others() -> dict[str, str]:
    """The types of each kind of models that do not run here, separated by spaces."""
    left = {*CONFIG_MAPPING} - {*types()}
    kinds: dict[str, list[str]] = {kind: [] for kind in _TASKS}
    for kind, tasks in _TASKS.items():
        for task in tasks.split():
            for name in sorted(left & {*getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")}):
                # models that take audio and write text are in the mapping of encoder-decoders, too
                whole = kind != "encoder-decoder" or CONFIG_MAPPING[name]().is_encoder_decoder
                kinds[kind if whole else "audio"].append(name)
                left.remove(name)
    return {kind: " ".join(names) for kind, names in kinds.items()}


def written(table: Mapping[str, Any]) -> str:
    """The text of the file: a line for each type."""
    lines = (f"{json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in table.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(written(expected()))
    OTHERS_FILE.write_text(written(others()))
