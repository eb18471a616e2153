"""GPT-OSS: sinks, every other layer with a window, experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases, windows
from max.pipelines.models.experts import Experts
from max.pipelines.models.rope import LONGEST_SEQUENCE
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def gpt_oss_fields(keys: ConfigKeys) -> Fields:
    """The fields of a GPT-OSS's config."""
    fields = base_fields(keys, head_dim=64, eps=1e-5, longest=131072, theta=150000.0)
    count = keys.integer("num_local_experts", 1, LONGEST_SEQUENCE)
    alpha = keys.number("swiglu_alpha", over=0, default=1.702)
    experts = Experts(
        count,
        keys.integer("num_experts_per_tok", 1, count),
        fields["intermediate_size"],
        ExpertRouting("softmax_of_chosen"),
        bias=True,
        gate_bias=True,
        clamped_swiglu=(alpha, keys.number("swiglu_limit", over=0, default=7.0)),
        gate_up_layout="pairs",
    )
    return (
        fields
        | biases(keys, default=True)
        | windows(keys, fields["num_layers"], 2, 128)
        | {"sinks": True, "experts": experts}
    )


_EXPERTS = ("gate_up_proj", "down_proj")
NAMES = WeightNames(
    layer={
        "mlp.router": "mlp.gate.gate_score",
        **{f"mlp.experts.{part}": f"mlp.experts.{part}.weight" for part in _EXPERTS},
        **{f"mlp.experts.{part}_bias": f"mlp.experts.{part}.bias" for part in _EXPERTS},
    },
    transposed=tuple(f"experts.{part}.weight" for part in _EXPERTS),
)

GGUF = GGUFForm(
    "gpt-oss",
    "gpt_oss",
    keys={"num_experts": "num_local_experts"},
    read=lambda metadata: {"rope_parameters": {"truncate": False}},
    layer={"post_attention_norm": "post_attention_layernorm"},
    window_period=2,
    experts=ExpertKeys(weights=False),
)

ARCHITECTURES = [
    decoder_family(
        "GptOssForCausalLM", ["openai/gpt-oss-20b"], gpt_oss_fields, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
