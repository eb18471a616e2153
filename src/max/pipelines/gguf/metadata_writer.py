"""Converts the shape of a decoder to GGUF metadata: the inverse of `reader.py`.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of the ``gguf`` package.
"""

from __future__ import annotations

import math
from typing import Any

from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder_config import DecoderConfig
from max.pipelines.models.delta_net import DeltaNetForm
from max.pipelines.models.rope import RopeConfig, yarn_magnitude
from max.pipelines.models.short_conv import ShortConvForm
from max.pipelines.models.state_space import Mamba2Form, MambaForm

__all__ = ["decoder_metadata", "one_or_list", "period_of", "refused"]

_SCORINGS = {"softmax": 1, "sigmoid": 2, "softmax_of_chosen": 3}
"""llama.cpp's codes of router functions."""
_PUBLISHED_SWIGLU = (1.702, 7.0)


def decoder_metadata(config: DecoderConfig, form: GGUFForm) -> dict[str, Any]:
    """The metadata that describes a model; keys lack the prefix of the architecture.

    Args:
        config: The shape of the model.
        form: The form of its family.

    Raises:
        ModelFilesError: Files of the family cannot describe such a model.
    """
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": min(config.max_position_embeddings, 2**31 - 1),
        "embedding_length": config.hidden_size,
        "feed_forward_length": _feed_forward(config),
        "vocab_size": config.vocab_size,
    }
    kind = "layer_norm_epsilon" if config.norm.kind == "layer" else "layer_norm_rms_epsilon"
    values[f"attention.{kind}"] = float(config.norm_eps)
    values |= _attention(config) | _rotation(config, form) | _caps(config)
    values |= _experts(config, form) | _recurrence(config, form)
    values |= _window_pattern(config, form)
    return values | (form.write(config) if form.write is not None else {})


def one_or_list(numbers: list[int]) -> int | list[int]:
    """The number of all layers if they are equal; else those by layer.

    Args:
        numbers: The numbers by layer.
    """
    return numbers[0] if len({*numbers}) == 1 else numbers


def _feed_forward(config: DecoderConfig) -> int | list[int]:
    """The inner size of the MLP of each layer; 0 if a layer has none."""
    sizes = config.layer_sizes or (config.intermediate_size,) * config.num_layers
    return one_or_list([n if config.feeds_forward(i) else 0 for i, n in enumerate(sizes)])


def _attention(config: DecoderConfig) -> dict[str, Any]:
    """The keys of attention: heads, their sizes, windows."""
    attends = [config.kind_of(i) in ("attention", "both") for i in range(config.num_layers)]
    if not any(attends):
        return {"attention.head_count": 0}
    heads = one_or_list([config.num_kv_heads if yes else 0 for yes in attends])
    if isinstance(config.recurrence, DeltaNetForm):
        # the distance between attention layers is stated instead
        heads = config.num_kv_heads
    values: dict[str, Any] = {"attention.head_count": config.num_heads}
    if config.latent is None:
        values["attention.head_count_kv"] = heads
        values["attention.key_length"] = values["attention.value_length"] = config.head_dim
    else:
        latent = config.latent
        values |= {
            # the cache stores one latent for all heads
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": latent.rank,
            "attention.key_length": latent.rank + latent.rotated_dim,
            "attention.value_length": latent.rank,
            "attention.key_length_mla": latent.plain_dim + latent.rotated_dim,
            "attention.value_length_mla": latent.value_dim,
        }
        if latent.query_rank:
            values["attention.q_lora_rank"] = latent.query_rank
    if config.sliding_window is not None and not config.chunked:
        values["attention.sliding_window"] = config.sliding_window
    if config.clip_qkv is not None:
        values["attention.clamp_kqv"] = float(config.clip_qkv)
    return values


def _window_pattern(config: DecoderConfig, form: GGUFForm) -> dict[str, Any]:
    """States which layers have a window, unless all have one or the family fixes the layers."""
    if config.sliding_window is None or config.chunked:
        return {}
    windowed = [i not in config.full_attention_layers for i in range(config.num_layers)]
    period = form.window_period
    default = [period is None or (i + 1) % period > 0 for i in range(config.num_layers)]
    if windowed == default and not form.states_windows:
        return {}
    return {"attention.sliding_window_pattern": windowed}


def _rotation(config: DecoderConfig, form: GGUFForm) -> dict[str, Any]:
    """The keys of the rotation."""
    rope = config.rope
    if rope is None:
        return {}
    dim = (
        config.latent.rotated_dim
        if config.latent is not None
        else rope.rotated_dim or config.head_dim
    )
    if rope.kind == "dynamic" and rope.parameters["alpha"] is None:
        raise refused(form.name, "a rotation whose base depends on the longest sequence (dynamic)")
    values: dict[str, Any] = {
        "rope.freq_base": float(rope.base(dim, config.max_position_embeddings)),
        "rope.dimension_count": dim,
    }
    if config.local_rope is not None:
        if config.local_rope.kind != "default":
            raise refused(
                form.name,
                f"layers with a window, which scale their rotation by {config.local_rope.kind}",
            )
        values["rope.freq_base_swa"] = float(config.local_rope.theta)
    return values | _scaling(rope, config, form)


def _scaling(rope: RopeConfig, config: DecoderConfig, form: GGUFForm) -> dict[str, Any]:
    """The scaling of the rotation; the frequency factors of Llama 3 and LongRoPE are tensors instead."""
    parameters, prefix = rope.parameters, "rope.scaling."
    original = int(parameters.get("original_max_position_embeddings") or 0)
    if rope.kind == "linear":
        return {f"{prefix}type": "linear", f"{prefix}factor": float(parameters["factor"])}
    if rope.kind == "longrope":
        return {
            f"{prefix}original_context_length": original,
            f"{prefix}attn_factor": float(rope.longrope_magnitude()),
        }
    if rope.kind != "yarn":
        return {}
    factor = float(parameters["factor"])
    values: dict[str, Any] = {
        f"{prefix}type": "yarn",
        f"{prefix}factor": factor,
        f"{prefix}original_context_length": original,
    }
    for key, stored in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if parameters.get(key):
            values[f"{prefix}{stored}"] = float(parameters[key])
    unit, own, all_dim = (
        yarn_magnitude(factor, 1.0),
        parameters.get("mscale"),
        parameters.get("mscale_all_dim"),
    )
    magnitude = rope.stated_yarn_magnitude()
    magnitude, default = unit if magnitude is None else magnitude, unit
    # the magnitude of a file that states no factor
    if form.yarn_multiplier and all_dim and (config.latent is not None or own == 1):
        values[f"{prefix}yarn_log_multiplier"] = form.yarn_multiplier * float(all_dim)
        # latent attention takes mscale as equal to mscale_all_dim, other models as 1
        default = 1.0 if config.latent is not None else unit / yarn_magnitude(factor, all_dim)
    if not math.isclose(magnitude, default):
        # relative to the magnitude that YaRN computes
        values[f"{prefix}attn_factor"] = magnitude / unit
    return values


def _caps(config: DecoderConfig) -> dict[str, Any]:
    """The keys of caps of scores and logits."""
    values: dict[str, Any] = {}
    if config.scores_soft_cap is not None:
        values["attn_logit_softcapping"] = float(config.scores_soft_cap)
    if config.logits_soft_cap is not None:
        values["final_logit_softcapping"] = float(config.logits_soft_cap)
    return values


def _experts(config: DecoderConfig, form: GGUFForm) -> dict[str, Any]:
    """The keys of experts; none for models without."""
    experts, stated = config.experts, form.experts
    if (beside := config.experts_beside) is not None:
        return {
            "expert_count": beside.count,
            "expert_used_count": beside.per_token,
            "expert_feed_forward_length": beside.size,
        }
    if experts is None:
        return {}
    if experts.clamped_swiglu not in (None, _PUBLISHED_SWIGLU):
        raise refused(form.name, f"a SwiGLU of other numbers than {_PUBLISHED_SWIGLU}")
    routing, count = experts.routing, len(experts.dense_layers)
    values: dict[str, Any] = {
        "expert_count": experts.count,
        "expert_used_count": experts.per_token,
        "expert_feed_forward_length": experts.size,
    }
    if stated.weights:
        values["expert_weights_norm"] = routing.normalised
        values["expert_weights_scale"] = float(routing.scale)
    if stated.scoring:
        values["expert_gating_func"] = _SCORINGS[routing.scoring]
    if routing.groups > 1:
        values |= {"expert_group_count": routing.groups, "expert_group_used_count": routing.chosen_groups}  # fmt: skip
    if stated.shared_count:
        values["expert_shared_count"] = experts.shared_size // experts.size
    if experts.shared_size:
        values["expert_shared_feed_forward_length"] = experts.shared_size
    if stated.dense_layers == "written":
        return values
    if experts.dense_layers == frozenset(range(count)):
        values["leading_dense_block_count"] = count
    elif stated.dense_layers == "leading":
        raise refused(form.name, "layers without experts between layers with some")
    return values


def period_of(name: str, layers: list[bool], kind: str) -> int:
    """The distance between marked layers, the last one of each period.

    Args:
        name: llama.cpp's name of the architecture.
        layers: Whether each layer is marked.
        kind: What they are, for the error.

    Raises:
        ModelFilesError: The distances differ.
    """
    for step in range(1, len(layers) + 1):
        if all(marked == ((i + 1) % step == 0) for i, marked in enumerate(layers)):
            return step
    raise refused(name, f"layers with {kind} at uneven distances")


def _recurrence(config: DecoderConfig, form: GGUFForm) -> dict[str, Any]:
    """The keys of recurrent layers; none for models without."""
    match mixer := config.recurrence:
        case MambaForm():
            return {
                "ssm.conv_kernel": mixer.taps,
                "ssm.inner_size": mixer.channels,
                "ssm.state_size": mixer.state_size,
                "ssm.time_step_rank": mixer.rank,
            }
        case Mamba2Form():
            return {
                "ssm.conv_kernel": mixer.taps,
                "ssm.inner_size": mixer.heads * mixer.head_dim,
                "ssm.state_size": mixer.state_size,
                "ssm.time_step_rank": mixer.heads,
                "ssm.group_count": mixer.groups,
            }
        case ShortConvForm():
            return {"shortconv.l_cache": mixer.taps}
        case DeltaNetForm():
            return {
                "ssm.conv_kernel": mixer.taps,
                "ssm.inner_size": mixer.heads * mixer.value_dim,
                "ssm.state_size": mixer.key_dim,
                "ssm.time_step_rank": mixer.heads,
                "ssm.group_count": mixer.key_heads,
                "full_attention_interval": _attention_period(config, form),
            }
        case _:
            return {}


def _attention_period(config: DecoderConfig, form: GGUFForm) -> int:
    attends = [config.kind_of(index) == "attention" for index in range(config.num_layers)]
    return period_of(form.name, attends, "attention")


def refused(name: str, difference: str) -> ModelFilesError:
    """The error of a model that files of its family cannot describe.

    Args:
        name: llama.cpp's name of the architecture.
        difference: What files cannot describe.
    """
    return ModelFilesError(
        f"GGUF files of {name} do not describe {difference}",
        "Keep the folder, or give --quantize.",
    )
