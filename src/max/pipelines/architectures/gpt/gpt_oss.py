"""GPT-OSS: sinks, every other layer with a window, experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import periodic_windows
from max.pipelines.models.decoder.read_config import read_decoder, with_biases, with_windows
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def gpt_oss_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A GPT-OSS."""
    config = read_decoder(keys, head_dim=64, eps=1e-5, longest=131072, theta=150000.0)
    count = keys.integer("num_local_experts", 1, LONGEST_SEQUENCE)
    alpha = keys.number("swiglu_alpha", over=0, default=1.702)
    experts = Experts(
        count,
        keys.integer("num_experts_per_tok", 1, count),
        keys.integer("intermediate_size", 1, LONGEST_SEQUENCE),
        ExpertRouting("softmax_of_chosen"),
        bias=True,
        gate_bias=True,
        clamped_swiglu=(alpha, keys.number("swiglu_limit", over=0, default=7.0)),
        gate_up_layout="pairs",
    )
    config = with_biases(config, keys, default=True).with_attention(sinks=True)
    windows = periodic_windows(keys, config.num_layers, 2, 128)
    return with_windows(config, *windows).with_experts(experts)


_EXPERTS = ("gate_up_proj", "down_proj")
NAMES = WeightNames(
    layer={
        "mlp.router": "mlp.gate.gate_score",
        **{f"mlp.experts.{part}": f"mlp.experts.{part}.weight" for part in _EXPERTS},
        **{f"mlp.experts.{part}_bias": f"mlp.experts.{part}.bias" for part in _EXPERTS},
    },
    transposed_weights=tuple(f"experts.{part}.weight" for part in _EXPERTS),
)

GGUF = GGUFForm(
    "gpt-oss",
    "gpt_oss",
    keys={"num_experts": "num_local_experts"},
    # the published models do not round YaRN's bounds, and files do not state it
    read=lambda metadata: {"rope_parameters": {"truncate": False}},
    layer={"post_attention_norm": "post_attention_layernorm"},
    window_period=2,
    experts=ExpertKeys(weights=False),
)

ARCHITECTURES = [
    decoder_family(
        "GptOssForCausalLM", ["openai/gpt-oss-20b"], gpt_oss_decoder, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
