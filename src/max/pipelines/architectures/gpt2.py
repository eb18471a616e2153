"""GPT-2: learned positions, layer norms, transposed and fused projections."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt_names import GPT_FILE_KEYS, GPT_KEYS
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import EVERY_BIAS, Fields, base_fields
from max.pipelines.models.norms import NormForm
from max.pipelines.models.rope import LONGEST_SEQUENCE
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def gpt2_fields(keys: ConfigKeys) -> Fields:
    """The fields of a GPT-2's config."""
    fields = base_fields(
        keys,
        GPT_KEYS,
        tied=True,
        gated=False,
        activation="gelu_new",
        eps=1e-5,
        longest=1024,
        rotates=False,
    )
    hidden = fields["hidden_size"]
    return fields | {
        "intermediate_size": keys.integer("n_inner", 1, LONGEST_SEQUENCE, 4 * hidden),
        "learned_positions": fields["max_position_embeddings"],
        "norm": NormForm("layer", bias=True),
        "attention_multiplier": None if keys.flag("scale_attn_weights", True) else 1.0,
        "score_divisor_by_layer": keys.flag("scale_attn_by_inverse_layer_idx"),
        **EVERY_BIAS,
    }


NAMES = WeightNames(
    prefix="transformer.",
    layers="h.",
    top={"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"},
    layer={
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_attn": "self_attn.qkv_proj",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
    transposed=("proj.weight",),
    unused=(".attn.bias", ".attn.masked_bias"),
)

GGUF = GGUFForm("gpt2", "gpt2", keys=GPT_FILE_KEYS, fused=("qkv_proj",))

ARCHITECTURES = [
    decoder_family(
        "GPT2LMHeadModel",
        ["openai-community/gpt2"],
        gpt2_fields,
        names=NAMES,
        rotates=False,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
