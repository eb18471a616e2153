"""Qwen2 MoE and Qwen3 MoE: layers of experts; the former has a shared expert."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.qwen.qwen2 import qwen2_window
from max.pipelines.architectures.qwen.qwen3 import qwen3_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import layers_of_type
from max.pipelines.models.decoder.read_config import read_decoder, with_windows
from max.pipelines.models.decoder.read_experts import EXPERT_NAMES, with_softmax_experts
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def qwen2_moe_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Qwen2 MoE."""
    config = read_decoder(keys).with_attention(bias=keys.flag("qkv_bias", True))
    layers, size = config.num_layers, qwen2_window(keys)
    first = keys.integer("max_window_layers", 0, LONGEST_SEQUENCE, 28)
    # another default than Qwen2's
    full = frozenset(i for i in range(layers) if i % 2 or i >= first or size is None)
    config = with_windows(config, size, layers_of_type(keys, layers, full))
    return with_softmax_experts(
        config,
        keys,
        size="moe_intermediate_size",
        shared_size_key="shared_expert_intermediate_size",
    )


def qwen3_moe_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Qwen3 MoE: all layers have the window, if there is one."""
    config = with_windows(qwen3_decoder(keys), qwen2_window(keys))
    return with_softmax_experts(config, keys, size="moe_intermediate_size")


NAMES = WeightNames(layer=EXPERT_NAMES, stacks={"mlp.experts": "mlp.experts"})


def dense_layers(metadata: Metadata) -> dict[str, Any]:
    """The layers without experts in a GGUF file: they have no router.

    Args:
        metadata: The file's metadata.
    """
    return {"mlp_only_layers": metadata.layers_without("ffn_gate_inp.weight")}


EXPERTS = ExpertKeys(dense_layers="tensors")
GGUF_2 = GGUFForm(
    "qwen2moe",
    "qwen2_moe",
    keys={"attention_bias": "qkv_bias"},
    experts=EXPERTS,
    read=dense_layers,
)
GGUF_3 = GGUFForm(
    "qwen3moe",
    "qwen3_moe",
    constants={"norm_topk_prob": True},
    experts=EXPERTS,
    read=dense_layers,
)

ARCHITECTURES = [
    decoder_family(
        "Qwen2MoeForCausalLM",
        ["Qwen/Qwen1.5-MoE-A2.7B-Chat"],
        qwen2_moe_decoder,
        names=NAMES,
        gguf=GGUF_2,
    ),
    decoder_family(
        "Qwen3MoeForCausalLM", ["Qwen/Qwen3-30B-A3B"], qwen3_moe_decoder, names=NAMES, gguf=GGUF_3
    ),
]
"""The architectures of this module, for the registry."""
