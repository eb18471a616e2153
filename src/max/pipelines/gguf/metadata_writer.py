"""Converts the shape of a decoder to GGUF metadata: the inverse of `max.pipelines.gguf.reader`.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of the ``gguf`` package.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.models.decoder_config import DecoderConfig, QueryGrowth
from max.pipelines.models.delta_net import DeltaNetForm
from max.pipelines.models.rope import RopeConfig, yarn_magnitude
from max.pipelines.models.short_conv import ShortConvForm
from max.pipelines.models.state_space import Mamba2Form, MambaForm

__all__ = ["decoder_metadata"]

_SCORINGS = {"softmax": 1, "sigmoid": 2, "softmax_of_chosen": 3}
"""llama.cpp's codes of router functions."""
_COUNTS_SHARED = ("deepseek2", "dots1", "ernie4_5-moe", "glm4moe", "hunyuan-moe")
"""Architectures whose files state the number of shared experts instead of the size of the shared MLP."""
_TELL_DENSE_LAYERS = ("jamba", "qwen2moe", "qwen3moe", "qwen3next", "qwen35moe")
"""Architectures in whose files a layer without a router tensor has no experts."""
_PUBLISHED_SWIGLU = (1.702, 7.0)
_STATES_GATING = ("deepseek2", "dots1", "glm4moe", "lfm2moe", "minimax-m2")
_PERIODS = {"cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6, "gpt-oss": 2, "olmo2": 4}
"""The distance between layers without a window that files omit, by architecture."""
_STATES_PATTERN = ("gemma3n", "olmo2")
_STATES_FACTORS = ("granite", "granitemoe", "granitehybrid")


def decoder_metadata(config: DecoderConfig, name: str) -> dict[str, Any]:
    """The metadata that describes a model; keys lack the prefix ``name.``.

    Args:
        config: The shape of the model.
        name: llama.cpp's name of the architecture.

    Raises:
        ModelFilesError: Files of the architecture cannot describe such a model.
    """
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": min(config.max_position_embeddings, 2**31 - 1),
        "embedding_length": config.hidden_size,
        "feed_forward_length": _feed_forward(config),
        "vocab_size": config.vocab_size,
    }
    if config.norm.kind == "layer" or name.startswith("nemotron_h"):
        values["attention.layer_norm_epsilon"] = float(config.norm_eps)
    if config.norm.kind == "rms" or name == "phimoe":
        values["attention.layer_norm_rms_epsilon"] = float(config.norm_eps)
    _check_fixed(config, name)
    values |= _attention(config, name) | _rotation(config, name) | _factors(config, name)
    values |= _experts(config, name) | _recurrence(config, name)
    values |= _window_pattern(config, name) | _layer_kinds(config, name)
    if name in ("gptneox", "stablelm") or name == "falcon" and not config.parallel:
        values["use_parallel_residual"] = config.parallel
    return values


def _check_fixed(config: DecoderConfig, name: str) -> None:
    """Refuses models that differ from the published ones in a value that GGUF files do not store."""
    if name in ("gemma2", "gemma3"):
        is_largest = config.num_layers == {"gemma2": 46, "gemma3": 62}[name]
        divisor = config.hidden_size / config.num_heads if is_largest else config.head_dim
        if config.attention_multiplier is not None and not math.isclose(
            config.attention_multiplier, divisor**-0.5
        ):
            raise _refused(name, f"scores that are not divided by the root of {divisor:g}")
    if name == "llama4":
        layers = range(config.num_layers)
        count = 0 if config.experts is None else config.experts.count
        fixed = (
            (config.sliding_window, 8192, "chunks of other lengths than 8192"),
            (config.unrotated_layers, {i for i in layers if i % 4 == 3}, "other unrotated layers than each fourth"),
            (config.query_growth, QueryGrowth(0.1, 8192, 1, True), "other growths of queries than the published"),
            (config.qk_norm is None, count == 128, "norms of heads of 128 experts, nor their lack elsewhere"),
        )  # fmt: skip
        for value, published, difference in fixed:
            if value != published:
                raise _refused(name, difference)


def _one_or_list(numbers: list[int]) -> int | list[int]:
    return numbers[0] if len({*numbers}) == 1 else numbers


def _feed_forward(config: DecoderConfig) -> int | list[int]:
    """The inner size of the MLP of each layer; 0 if a layer has none."""
    sizes = config.layer_sizes or (config.intermediate_size,) * config.num_layers
    return _one_or_list([n if config.feeds_forward(i) else 0 for i, n in enumerate(sizes)])


def _attention(config: DecoderConfig, name: str) -> dict[str, Any]:
    """The keys of attention: heads, their sizes, windows."""
    attends = [config.kind_of(i) in ("attention", "both") for i in range(config.num_layers)]
    if not any(attends):
        return {"attention.head_count": 0}
    heads = _one_or_list([config.num_kv_heads if yes else 0 for yes in attends])
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
    if name == "mpt" or name == "falcon" and config.alibi_slopes is not None:
        values["attention.max_alibi_bias"] = 8.0
    return values


def _window_pattern(config: DecoderConfig, name: str) -> dict[str, Any]:
    """States which layers have a window, unless all have one or the family fixes the layers."""
    if config.sliding_window is None or config.chunked:
        return {}
    windowed = [i not in config.full_attention_layers for i in range(config.num_layers)]
    period = _PERIODS.get(name)
    default = [period is None or (i + 1) % period > 0 for i in range(config.num_layers)]
    if windowed == default and name not in _STATES_PATTERN:
        return {}
    return {"attention.sliding_window_pattern": windowed}


def _layer_kinds(config: DecoderConfig, name: str) -> dict[str, Any]:
    """Gemma 3n and 4: the differences between layers with and without a window, and the number of hidden states."""
    if name == "gemma3n":
        return _several_states(config, name)
    if name != "gemma4":
        return {}
    layers, inputs = range(config.num_layers), config.per_layer_inputs
    own = config.num_layers - config.shared_kv_layers
    windowed = [i not in config.full_attention_layers for i in layers]
    # llama.cpp takes shared keys from the last two layers with keys of their own
    if own < config.num_layers and windowed[max(own - 2, 0) : own] != [True, False]:
        raise _refused(
            name, "shared keys of other layers than the last with a window and the last without"
        )
    dim = (config.full_attention_heads or (0, config.head_dim))[1]
    return {
        "attention.head_count_kv": _one_or_list([config.heads_of(i)[0] for i in layers]),
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": config.shared_kv_layers,
        "embedding_length_per_layer_input": 0 if inputs is None else inputs.size,
        "rope.dimension_count": dim,
        "rope.dimension_count_swa": config.head_dim,
    }


def _several_states(config: DecoderConfig, name: str) -> dict[str, Any]:
    """The keys of models with several residual streams (Gemma 3n)."""
    states, inputs = config.alternating, config.per_layer_inputs
    assert states is not None
    if inputs is None or not states.scaled:
        raise _refused(name, "layers without vectors, or states that are not scaled")
    return {
        "embedding_length_per_layer_input": inputs.size,
        "altup.active_idx": states.active,
        "altup.num_inputs": states.count,
        "attention.shared_kv_layers": config.shared_kv_layers,
        # the bound of gates, in standard deviations from their mean
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(share) if share else -math.inf for share in config.sparsity
        ],
    }


def _rotation(config: DecoderConfig, name: str) -> dict[str, Any]:
    """The keys of the rotation."""
    rope = config.rope
    # among Granite's hybrid models only some rotate heads
    states = {"rope.scaling.finetuned": rope is not None} if name == "granitehybrid" else {}
    if rope is None:
        return states
    dim = (
        config.latent.rotated_dim
        if config.latent is not None
        else rope.rotated_dim or config.head_dim
    )
    if rope.kind == "dynamic" and rope.parameters["alpha"] is None:
        raise _refused(name, "a rotation whose base depends on the longest sequence (dynamic)")
    values: dict[str, Any] = {
        "rope.freq_base": float(rope.base(dim, config.max_position_embeddings)),
        "rope.dimension_count": dim,
        **states,
    }
    if config.local_rope is not None:
        if config.local_rope.kind != "default":
            raise _refused(
                name,
                f"layers with a window, which scale their rotation by {config.local_rope.kind}",
            )
        values["rope.freq_base_swa"] = float(config.local_rope.theta)
    if name in ("qwen35", "qwen35moe"):
        # the numbers of pairs rotated by time, height and width; for text these positions are equal
        pairs = dim // 2
        values["rope.dimension_sections"] = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    if config.query_growth is not None and name == "mistral3":
        values["attention.temperature_scale"] = float(config.query_growth.beta)
    return values | _scaling(rope, config, name)


def _scaling(rope: RopeConfig, config: DecoderConfig, name: str) -> dict[str, Any]:
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
    if config.latent is not None and all_dim:
        # without a factor, mscale equals mscale_all_dim
        values[f"{prefix}yarn_log_multiplier"], default = 0.1 * float(all_dim), 1.0
    elif name == "mistral3" and own == 1 and all_dim:
        values[f"{prefix}yarn_log_multiplier"] = float(all_dim)
        default = unit / yarn_magnitude(factor, all_dim)
    if not math.isclose(magnitude, default):
        # relative to the magnitude that YaRN computes
        values[f"{prefix}attn_factor"] = magnitude / unit
    return values


def _factors(config: DecoderConfig, name: str) -> dict[str, Any]:
    """The keys of factors and caps of scores, logits and residuals."""
    values: dict[str, Any] = {}
    if config.scores_soft_cap is not None:
        values["attn_logit_softcapping"] = float(config.scores_soft_cap)
    if config.logits_soft_cap is not None:
        values["final_logit_softcapping"] = float(config.logits_soft_cap)
    if name in ("command-r", "cohere2"):
        values["logit_scale"] = 1.0 / config.logits_scaling
    if name in _STATES_FACTORS:
        multiplier = config.attention_multiplier
        values |= {
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
            "attention.scale": float(config.head_dim**-0.5 if multiplier is None else multiplier),
        }
    return values


def _experts(config: DecoderConfig, name: str) -> dict[str, Any]:
    """The keys of experts; none for models without."""
    experts = config.experts
    if (beside := config.experts_beside) is not None:
        return {
            "expert_count": beside.count,
            "expert_used_count": beside.per_token,
            "expert_feed_forward_length": beside.size,
        }
    if experts is None:
        return {}
    if experts.clamped_swiglu not in (None, _PUBLISHED_SWIGLU):
        raise _refused(name, f"a SwiGLU of other numbers than {_PUBLISHED_SWIGLU}")
    routing, count = experts.routing, len(experts.dense_layers)
    values: dict[str, Any] = {
        "expert_count": experts.count,
        "expert_used_count": experts.per_token,
        "expert_feed_forward_length": experts.size,
    }
    if name not in ("llama", "phimoe", "gpt-oss", "granitemoe", "granitehybrid", "jamba", "llama4"):
        values["expert_weights_norm"] = routing.normalised
        values["expert_weights_scale"] = float(routing.scale)
    if name in _STATES_GATING:
        values["expert_gating_func"] = _SCORINGS[routing.scoring]
    if routing.groups > 1:
        values |= {"expert_group_count": routing.groups, "expert_group_used_count": routing.chosen_groups}  # fmt: skip
    if name in _COUNTS_SHARED:
        values["expert_shared_count"] = experts.shared_size // experts.size
    if experts.shared_size:
        values["expert_shared_feed_forward_length"] = experts.shared_size
    if name == "llama4":
        values["interleave_moe_layer_step"] = _step(config, name)
    elif name == "nemotron_h_moe":
        if any(config.feeds_forward(index) for index in experts.dense_layers):
            raise _refused(name, "layers with an MLP beside layers with experts")
        # one shared MLP of the stated size
        values["expert_shared_count"] = 1
        if experts.latent_size is not None:
            values["moe_latent_size"] = experts.latent_size
    elif experts.dense_layers == frozenset(range(count)):
        values["leading_dense_block_count"] = count
    elif name not in _TELL_DENSE_LAYERS:
        raise _refused(name, "layers without experts between layers with some")
    if name == "ernie4_5-moe":
        values["interleave_moe_layer_step"] = 1
    return values


def _step(config: DecoderConfig, name: str) -> int:
    """The distance between layers with experts; the last layer of each period has experts."""
    dense = config.experts.dense_layers if config.experts is not None else frozenset[int]()
    for step in range(1, config.num_layers + 1):
        if dense == {i for i in range(config.num_layers) if (i + 1) % step}:
            return step
    raise _refused(name, "layers with experts at uneven distances")


def _recurrence(config: DecoderConfig, name: str) -> dict[str, Any]:
    """The keys of recurrent layers; none for models without."""
    form = config.recurrence
    match form:
        case MambaForm():
            return {
                "ssm.conv_kernel": form.taps,
                "ssm.inner_size": form.channels,
                "ssm.state_size": form.state_size,
                "ssm.time_step_rank": form.rank,
            }
        case Mamba2Form():
            return {
                "ssm.conv_kernel": form.taps,
                "ssm.inner_size": form.heads * form.head_dim,
                "ssm.state_size": form.state_size,
                "ssm.time_step_rank": form.heads,
                "ssm.group_count": form.groups,
            }
        case ShortConvForm():
            return {"shortconv.l_cache": form.taps}
        case DeltaNetForm():
            return {
                "ssm.conv_kernel": form.taps,
                "ssm.inner_size": form.heads * form.value_dim,
                "ssm.state_size": form.key_dim,
                "ssm.time_step_rank": form.heads,
                "ssm.group_count": form.key_heads,
                "full_attention_interval": _interval(config, name),
            }
        case _:
            return {}


def _interval(config: DecoderConfig, name: str) -> int:
    """The distance between layers with attention; the last layer of each period has attention."""
    kinds = [config.kind_of(index) for index in range(config.num_layers)]
    for step in range(1, config.num_layers + 1):
        if all((kind == "attention") == ((i + 1) % step == 0) for i, kind in enumerate(kinds)):
            return step
    raise _refused(name, "layers with attention at uneven distances")


def _refused(name: str, difference: str) -> ModelFilesError:
    return ModelFilesError(
        f"GGUF files of {name} do not describe {difference}", "Keep the folder, or give --quantize."
    )
