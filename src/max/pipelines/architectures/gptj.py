"""GPT-J: attention and MLP in parallel, partly rotated heads with adjacent pairs."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt_names import GPT_KEYS
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields
from max.pipelines.models.norms import NormForm
from max.pipelines.models.rope import LONGEST_SEQUENCE, RopeConfig
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def gptj_fields(keys: ConfigKeys) -> Fields:
    """The fields of a GPT-J's config."""
    fields = base_fields(keys, GPT_KEYS, gated=False, activation="gelu_new", eps=1e-5, longest=2048)
    rotated = keys.integer("rotary_dim", 2, fields["head_dim"], fields["head_dim"])
    return fields | {
        "intermediate_size": keys.integer(
            "n_inner", 1, LONGEST_SEQUENCE, 4 * fields["hidden_size"]
        ),
        "rope": RopeConfig(rotated_dim=rotated),
        "interleaved_rope": True,
        "norm": NormForm("layer", bias=True),
        "norm_places": ("attention_input",),
        "parallel": True,
        "mlp_bias": True,
        "output_bias": True,
    }


NAMES = WeightNames(
    prefix="transformer.",
    layers="h.",
    top={"wte": "embed_tokens", "ln_f": "norm"},
    layer={
        "ln_1": "input_layernorm",
        "attn.out_proj": "self_attn.o_proj",
        "attn": "self_attn",
        "mlp.fc_in": "mlp.up_proj",
        "mlp.fc_out": "mlp.down_proj",
    },
    unused=(".attn.bias", ".attn.masked_bias", "attn.embed_positions"),
)

ARCHITECTURES = [
    decoder_family("GPTJForCausalLM", ["EleutherAI/gpt-j-6b"], gptj_fields, names=NAMES)
]
"""The architectures of this module, for the registry."""
