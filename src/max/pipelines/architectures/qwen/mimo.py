"""MiMo: a Qwen2 with layers that predict further tokens, apart from the others."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.qwen.qwen2 import qwen2_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]

_MOST_LAYERS = 16
"""The most prediction layers; the first one drafts tokens."""


def _mimo(keys: ConfigKeys) -> DecoderConfig:
    return replace(qwen2_decoder(keys), prediction_reads_state_first=True)


NAMES = WeightNames(
    prediction={
        "mtp_layers.0.token_layernorm": "enorm",
        "mtp_layers.0.hidden_layernorm": "hnorm",
        "mtp_layers.0.input_proj": "eh_proj",
        "mtp_layers.0.final_layernorm": "shared_head.norm",
        "mtp_layers.0": "",
    },
    unused_parts=tuple(f"mtp_layers.{index}." for index in range(1, _MOST_LAYERS)),
)

ARCHITECTURES = [
    decoder_family(
        "MiMoForCausalLM",
        ["XiaomiMiMo/MiMo-7B-RL", "XiaomiMiMo/MiMo-7B-Base"],
        _mimo,
        names=NAMES,
        # llama.cpp has no names for the prediction layers: files are read as Qwen2
        gguf=GGUFForm("qwen2", "qwen2", class_name="Qwen2ForCausalLM"),
    )
]
"""The architectures of this module, for the registry."""
