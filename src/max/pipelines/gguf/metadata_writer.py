"""Converts the shape of a decoder to GGUF metadata: the inverse of `reader.py`.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of the ``gguf`` package.
"""

from __future__ import annotations

import math
from typing import Any

from max.nn.layers.scaled_rotary import yarn_magnitude
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.delta_net import DeltaNetForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.latent_attention import LatentForm
from max.pipelines.models.blocks.parallel_hybrid import ParallelHybridForm
from max.pipelines.models.blocks.rope import RopeConfig
from max.pipelines.models.blocks.short_conv import ShortConvForm
from max.pipelines.models.blocks.state_space import Mamba2Form, MambaForm
from max.pipelines.models.decoder.config import DecoderConfig

__all__ = ["decoder_metadata", "one_or_list", "period_of", "refusal_of"]

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
    values |= _attention(config) | _rotation(config, form)
    values |= _experts(config, form) | _recurrence(config, form)
    values |= _window_pattern(config, form)
    if config.logits_soft_cap is not None:
        values["final_logit_softcapping"] = float(config.logits_soft_cap)
    return values | (form.write(config) if form.write is not None else {})


def one_or_list(numbers: list[int]) -> int | list[int]:
    """The number of all layers if they are equal; else those by layer.

    Args:
        numbers: The numbers by layer.
    """
    return numbers[0] if len({*numbers}) == 1 else numbers


def _feed_forward(config: DecoderConfig) -> int | list[int]:
    """The inner size of the MLP of each layer; 0 if a layer has none. Layers with experts have that of the others."""
    mlps = [form.size for form in config.every(MLPForm)]
    experts = config.first_form(Experts)
    size = max(mlps) if mlps else config.hidden_size if experts is None else experts.size
    forms = [block.feed_forward for block in config.blocks]
    return one_or_list(
        [0 if form is None else form.size if isinstance(form, MLPForm) else size for form in forms]
    )


def _attention(config: DecoderConfig) -> dict[str, Any]:
    """The keys of attention: heads, their sizes, windows."""
    attention, latent = config.first_form(AttentionForm), config.first_form(LatentForm)
    if latent is not None:
        values: dict[str, Any] = {
            "attention.head_count": latent.num_attention_heads,
            # the cache stores one latent for all heads
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": latent.rank,
            "attention.key_length": latent.cached_dim,
            "attention.value_length": latent.rank,
            "attention.key_length_mla": latent.head_dim,
            "attention.value_length_mla": latent.value_dim,
        }
        return values | ({"attention.q_lora_rank": latent.query_rank} if latent.query_rank else {})
    if attention is None:
        return {"attention.head_count": 0}
    attends = [isinstance(b.mixer, AttentionForm | ParallelHybridForm) for b in config.blocks]
    heads = one_or_list([attention.num_key_value_heads if yes else 0 for yes in attends])
    if isinstance(config.recurrence, DeltaNetForm):
        # the distance between attention layers is stated instead
        heads = attention.num_key_value_heads
    values = {
        "attention.head_count": attention.num_attention_heads,
        "attention.head_count_kv": heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
    }
    window = _window(config)
    if window is not None:
        values["attention.sliding_window"] = window
    if attention.clip is not None:
        values["attention.clamp_kqv"] = float(attention.clip)
    if attention.soft_cap is not None:
        values["attn_logit_softcapping"] = float(attention.soft_cap)
    return values


def _window(config: DecoderConfig) -> int | None:
    """The window; chunks are not stated."""
    windows = [form.window for form in config.every(AttentionForm) if not form.chunked]
    return next((window for window in windows if window is not None), None)


def _window_pattern(config: DecoderConfig, form: GGUFForm) -> dict[str, Any]:
    """States which layers have a window, unless all have one or the family fixes the layers."""
    if _window(config) is None:
        return {}
    windowed = [attention.window is not None for attention in config.every(AttentionForm)]
    period = form.window_period
    default = [period is None or (i + 1) % period > 0 for i in range(config.num_layers)]
    if windowed == default and not form.states_windows:
        return {}
    return {"attention.sliding_window_pattern": windowed}


def _rotation(config: DecoderConfig, form: GGUFForm) -> dict[str, Any]:
    """The keys of the rotation."""
    latent = config.first_form(LatentForm)
    attentions = config.every(AttentionForm)
    # files state the rotation of layers without a window first
    attentions.sort(key=lambda attention: attention.window is not None)
    ropes = [(own.rope, own.head_dim) for own in attentions if own.rope is not None]
    if latent is not None:
        rope, dim = latent.rope, latent.rotated_dim
    elif ropes:
        rope, head_dim = ropes[0]
        dim = rope.rotated_dim or head_dim
    else:
        return {}
    if rope.kind == "dynamic" and rope.parameters["alpha"] is None:
        raise refusal_of(
            form.name, "a rotation whose base depends on the longest sequence (dynamic)"
        )
    values: dict[str, Any] = {
        "rope.freq_base": float(rope.base(dim, config.max_position_embeddings)),
        "rope.dimension_count": dim,
    }
    local = next((other for other, _ in ropes if other != rope), None)
    if local is not None:
        if local.kind != "default":
            raise refusal_of(
                form.name, f"layers with a window, which scale their rotation by {local.kind}"
            )
        values["rope.freq_base_swa"] = float(local.theta)
    return values | _scaling(rope, config, form)


def _scaling(rope: RopeConfig, config: DecoderConfig, form: GGUFForm) -> dict[str, Any]:
    """The scaling of the rotation; the frequency factors of Llama 3 and LongRoPE are tensors instead."""
    parameters, prefix = rope.parameters, "rope.scaling."
    if rope.kind == "linear":
        return {f"{prefix}type": "linear", f"{prefix}factor": float(parameters["factor"])}
    if rope.kind not in ("longrope", "yarn"):
        return {}
    original = int(parameters["original_max_position_embeddings"])
    if rope.kind == "longrope":
        return {
            f"{prefix}original_context_length": original,
            f"{prefix}attn_factor": float(rope.longrope_magnitude()),
        }
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
    if form.yarn_multiplier and all_dim and (config.first_form(LatentForm) is not None or own == 1):
        values[f"{prefix}yarn_log_multiplier"] = form.yarn_multiplier * float(all_dim)
        # latent attention takes mscale as equal to mscale_all_dim, other models as 1
        is_latent = config.first_form(LatentForm) is not None
        default = 1.0 if is_latent else unit / yarn_magnitude(factor, all_dim)
    if not math.isclose(magnitude, default):
        # relative to the magnitude that YaRN computes
        values[f"{prefix}attn_factor"] = magnitude / unit
    return values


def _experts(config: DecoderConfig, form: GGUFForm) -> dict[str, Any]:
    """The keys of experts; none for models without."""
    experts, stated = config.first_form(Experts), form.experts
    if experts is None:
        return {}
    routed = [any(isinstance(f, Experts) for f in block.feed_forwards) for block in config.blocks]
    # experts beside MLPs are those of all layers, with a fixed routing
    beside = any(len(block.feed_forwards) > 1 for block in config.blocks)
    count = routed.index(True)  # dense layers before the first with experts
    # files state no numbers: llama.cpp has these in its code
    if experts.clamped_swiglu not in (None, _PUBLISHED_SWIGLU):
        raise refusal_of(form.name, f"a SwiGLU of other numbers than {_PUBLISHED_SWIGLU}")
    routing = experts.routing
    values: dict[str, Any] = {
        "expert_count": experts.count,
        "expert_used_count": experts.per_token,
        "expert_feed_forward_length": experts.size,
    }
    if beside:
        return values
    if stated.weights:
        values["expert_weights_norm"] = routing.normalized
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
    if all(routed[count:]):
        values["leading_dense_block_count"] = count
    elif stated.dense_layers == "leading":
        raise refusal_of(form.name, "layers without experts between layers with some")
    return values


def period_of(name: str, layers: list[bool], what: str) -> int:
    """The distance between marked layers, the last one of each period.

    Args:
        name: llama.cpp's name of the architecture.
        layers: Whether each layer is marked.
        what: What they are, for the error.

    Raises:
        ModelFilesError: The distances differ.
    """
    for step in range(1, len(layers) + 1):
        if all(marked == ((i + 1) % step == 0) for i, marked in enumerate(layers)):
            return step
    raise refusal_of(name, f"layers with {what} at uneven distances")


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
                "ssm.inner_size": mixer.num_heads * mixer.head_dim,
                "ssm.state_size": mixer.state_size,
                "ssm.time_step_rank": mixer.num_heads,
                "ssm.group_count": mixer.groups,
            }
        case ShortConvForm():
            return {"shortconv.l_cache": mixer.taps}
        case DeltaNetForm():
            return {
                "ssm.conv_kernel": mixer.taps,
                "ssm.inner_size": mixer.num_heads * mixer.value_dim,
                "ssm.state_size": mixer.key_dim,
                "ssm.time_step_rank": mixer.num_heads,
                "ssm.group_count": mixer.key_heads,
                "full_attention_interval": _attention_period(config, form),
            }
        case _:
            return {}


def _attention_period(config: DecoderConfig, form: GGUFForm) -> int:
    attends = [isinstance(block.mixer, AttentionForm) for block in config.blocks]
    return period_of(form.name, attends, "attention")


def refusal_of(name: str, difference: str) -> ModelFilesError:
    """The error of a model that files of its family cannot describe.

    Args:
        name: llama.cpp's name of the architecture.
        difference: What files cannot describe.
    """
    return ModelFilesError(
        f"GGUF files of {name} do not describe {difference}",
        "Keep the folder, or give --quantize.",
    )
