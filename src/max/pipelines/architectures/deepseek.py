"""DeepSeek V2, V3 and V3.2, and Kimi K2: latent attention, experts in groups and shared ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from max.driver import Tensor
from max.graph.weights import WeightData
from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.latent_attention import LatentForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import MOST_LAYERS
from max.pipelines.models.decoder.read_experts import EXPERT_NAMES, with_grouped_experts
from max.pipelines.models.decoder.read_latents import (
    dense_layers_of,
    read_latent_decoder,
    with_indexer,
)
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def deepseek_v3_decoder(
    keys: ConfigKeys, dense_layers: Collection[int] | None = None
) -> DecoderConfig:
    """A DeepSeek V3; Kimi K2 is the same. `dense_layers` are those without experts, if not the first ones."""
    keys.choice("scoring_func", ("sigmoid",), "sigmoid")
    keys.choice("topk_method", ("noaux_tc",), "noaux_tc")
    keys.integer("moe_layer_freq", 1, 1, 1)
    config = read_latent_decoder(keys, eps=1e-6, longest=4096)
    return with_grouped_experts(config, keys, dense_layers)


def deepseek_v32_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A DeepSeek V3.2: attention sees the tokens that an indexer selects."""
    layers = keys.integer("num_hidden_layers", 1, MOST_LAYERS)
    return with_indexer(deepseek_v3_decoder(keys, dense_layers_of(keys, layers)), keys)


def deepseek_v2_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A DeepSeek V2."""
    keys.choice("scoring_func", ("softmax",), "softmax")
    keys.integer("moe_layer_freq", 1, 1, 1)
    # transformers ignores norm_topk_prob
    bias = keys.flag("mlp_bias")
    grouped = keys.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"

    def of_softmax(experts: Experts) -> Experts:
        """The same experts, which the softmax of their scores selects."""
        routing = ExpertRouting(
            scale=experts.routing.scale,
            groups=experts.routing.groups if grouped else 1,
            chosen_groups=experts.routing.chosen_groups if grouped else 1,
            in_float32=True,
        )
        return replace(experts, routing=routing, shared_bias=bias)

    config = read_latent_decoder(keys, eps=1e-6).with_mlp(bias=bias)
    return with_grouped_experts(config, keys, change=of_softmax)


NAMES = WeightNames(layer=EXPERT_NAMES, stacks={"mlp.experts": "mlp.experts"})

_SIGMOID = 2
"""llama.cpp's code of routers with sigmoid scores."""


def _read(metadata: Metadata) -> dict[str, Any]:
    """Files with a separate key weight per head state the sizes of heads with the suffix ``_mla``."""

    def stated_value(key: str, otherwise: str) -> int:
        return int(metadata.least_zero(key, 0) or metadata.least_zero(otherwise, 0))

    head = stated_value("attention.key_length_mla", "attention.key_length")
    rotated = int(metadata.least_zero("rope.dimension_count", 0))
    special: dict[str, Any] = {
        "head_dim": None,
        "num_key_value_heads": None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": stated_value("attention.value_length_mla", "attention.value_length"),
    }
    if metadata.value("expert_gating_func") != _SIGMOID and metadata.config.get("n_group", 1) > 1:
        special["topk_method"] = "group_limited_greedy"
    # files have a tenth of it
    weight = 10.0 * metadata.least_zero("rope.scaling.yarn_log_multiplier", 0)
    if weight:
        special["rope_parameters"] = {"mscale": weight, "mscale_all_dim": weight}
    return special


def _split_weights(
    config: DecoderConfig, weights: Mapping[str, WeightData]
) -> tuple[dict[str, list[float]], dict[str, WeightData]]:
    """Splits the weights that expand latents into key weights ``[heads, latent, key]`` and value weights."""
    latent, split = config.first_form(LatentForm), dict(weights)
    assert latent is not None
    for name in weights:
        stem, suffix, _ = name.partition("kv_b_proj.weight")
        if not suffix:
            continue
        array = Tensor.from_dlpack(split.pop(name).data).to_numpy()
        heads = array.reshape(
            latent.num_attention_heads, latent.plain_dim + latent.value_dim, latent.rank
        )
        keys, values = heads[:, : latent.plain_dim].swapaxes(1, 2), heads[:, latent.plain_dim :]
        for part, rows in (("k_b_proj.weight", keys), ("v_b_proj.weight", values)):
            own_name = f"{stem}{part}"
            split[own_name] = WeightData.from_numpy(np.ascontiguousarray(rows), own_name)
    return {}, split


GGUF = GGUFForm(
    "deepseek2",
    "deepseek_v2",
    keys={"num_experts": "n_routed_experts"},
    read=_read,
    yarn_multiplier=0.1,
    experts=ExpertKeys(scoring=True, shared_count=True),
    split_weights=_split_weights,
)
GGUF_V3 = replace(GGUF, model_type="deepseek_v3", marks={"expert_gating_func": _SIGMOID})

ARCHITECTURES = [
    decoder_family(name, [example], fields, names=NAMES, gguf=gguf)
    for name, example, fields, gguf in (
        ("DeepseekV2ForCausalLM", "deepseek-ai/DeepSeek-V2-Lite-Chat", deepseek_v2_decoder, GGUF),
        ("DeepseekV3ForCausalLM", "deepseek-ai/DeepSeek-V3", deepseek_v3_decoder, GGUF_V3),
        ("DeepseekV32ForCausalLM", "deepseek-ai/DeepSeek-V3.2", deepseek_v32_decoder, ()),
    )
]
"""The architectures of this module, for the registry."""
