"""Edits of a config.json that transformers may take: keys that are left out, null, of other names, or extreme."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from transformers import PreTrainedConfig
from transformers.activations import ACT2CLS

from tests.architectures.drawn_parts import Draw

KEPT = ("model_type", "transformers_version")
ACTIVATIONS = sorted(set(ACT2CLS) - {"xielu"})
_EPSILON = (0.0, 1e-30, 1e-12, 0.5, 3, 7.0)
EXTREMES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _EPSILON),
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"),
        (*ACTIVATIONS, *ACTIVATIONS[:3]),
    ),
    "max_position_embeddings": (1, 7, 2**31 - 1, 2**40),
    "sliding_window": (0, 1, 2, 2**40, None),
    "local_attention": (2, 5, 2**40),
    "rope_theta": (1, 1.0, 0.5, 1e12, 10**9),
    "partial_rotary_factor": (0.5, 1.0, 1),
    "tie_word_embeddings": (True, False, None),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "norm_topk_prob"), (True, False)),
    **dict.fromkeys(
        (
            *("logits_scaling", "embedding_multiplier", "residual_multiplier"),
            *(
                "attention_multiplier",
                "logit_scale",
                "routed_scaling_factor",
                "query_pre_attn_scalar",
            ),
        ),
        (1, 0.3, 7, 1e-3, -0.5),
    ),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (None, 0.5, 50, 1e6)),
    "num_key_value_heads": (1, None),
    "head_dim": (4, 8, None),
    "num_hidden_layers": (1, 2),
    "layer_types": (None,),
    "quantization_config": (None,),
    "architectures": (None, [], ["SomeForTokenClassification"]),
    "use_cache": (False, None),
    "attention_dropout": (0.5, 0, 1),
    "dtype": ("float32", "bfloat16", None),
    "torch_dtype": ("float32", "float16"),
    "rope_scaling": (None, {}, {"type": "default"}, {"type": "linear", "factor": 2.0}),
    "rope_parameters": (None, {}),
    "id2label": ({"0": "a"},),
    "pretraining_tp": (2,),
    "an_unknown_key": (3, None, {"a": 1}),
}
"""Values of keys, whether the file has them or not."""


def legacy_rotation(values: dict[str, Any]) -> None:
    """Writes the rotation as files did before ``rope_parameters``."""
    rotation = values.get("rope_parameters")
    if not isinstance(rotation, dict) or any(isinstance(v, dict) for v in rotation.values()):
        return
    del values["rope_parameters"]
    rotation = dict(rotation)
    for key in ("rope_theta", "partial_rotary_factor"):
        if rotation.get(key) is not None:
            values[key] = rotation.pop(key)
    rotation["type"] = rotation.pop("rope_type", "default")
    values["rope_scaling"] = rotation if rotation["type"] != "default" else None


def second_name(draw: Draw, values: dict[str, Any], cls: type[PreTrainedConfig]) -> None:
    """Writes a key under the other name that its class has for it."""
    pairs = [(other, own) for other, own in cls.attribute_map.items() if own in values]
    if pairs:
        other, own = draw(st.sampled_from(pairs))
        values[other] = values.pop(own)


def edited(draw: Draw, values: dict[str, Any], cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """A config.json with some edits.

    Args:
        draw: Draws a value.
        values: The file.
        cls: Its class.
    """
    values = json.loads(json.dumps(values, default=str))
    for _ in range(draw(st.integers(0, 4))):
        keys = sorted({*values} - {*KEPT})
        match draw(st.sampled_from(["absent", "null", "extreme", "extreme", "legacy", "name"])):
            case "absent":
                del values[draw(st.sampled_from(keys))]
            case "null":
                values[draw(st.sampled_from(keys))] = None
            case "extreme":
                likely = sorted({*EXTREMES} & {*keys}) or sorted(EXTREMES)
                key = draw(st.one_of(st.sampled_from(likely), st.sampled_from(sorted(EXTREMES))))
                values[key] = draw(st.sampled_from(EXTREMES[key]))
            case "legacy":
                legacy_rotation(values)
            case _:
                second_name(draw, values, cls)
    return values
