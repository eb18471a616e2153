"""Falcon: fused projections, attention and MLP in parallel, rotation or ALiBi."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt_names import MEGATRON_LAYER
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.alibi import alibi_slopes
from max.pipelines.models.config_fields import Fields, base_fields, biases
from max.pipelines.models.norms import NormForm
from max.pipelines.models.rope import LONGEST_SEQUENCE
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES", "falcon_fields"]


_KEYS = {
    "intermediate_size": "",
    "num_key_value_heads": "",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation",
    "head_dim": "",
}


def falcon_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Falcon's config."""
    alibi, grouped = keys.flag("alibi"), keys.flag("new_decoder_architecture")
    fields = base_fields(
        keys,
        _KEYS,
        tied=True,
        gated=False,
        activation="gelu",
        eps=1e-5,
        rotates=not alibi,
    )
    hidden, heads = fields["hidden_size"], fields["num_heads"]
    shared = keys.flag("multi_query", True) and not grouped
    kv_heads = keys.integer("num_kv_heads", 1, heads, heads) if grouped else 1 if shared else heads
    if heads % kv_heads:
        raise keys.error("num_kv_heads", f"a divisor of num_attention_heads, which is {heads}")
    parallel = grouped or keys.flag("parallel_attn", True)
    norms = keys.integer("num_ln_in_parallel_attn", 1, 2, 2 if grouped else 1)
    shares_norm = parallel and norms == 1
    return fields | {
        "num_kv_heads": kv_heads,
        "intermediate_size": keys.integer("ffn_hidden_size", 1, LONGEST_SEQUENCE, 4 * hidden),
        "alibi_slopes": alibi_slopes(heads, factor=fields["head_dim"] ** -0.5) if alibi else None,
        "norm": NormForm("layer", bias=True),
        "norm_places": ("attention_input",) if shares_norm else ("attention_input", "mlp_input"),
        "parallel": parallel,
        "qkv_layout": "rows" if shared else "heads",
        **biases(keys, "bias", mlp="bias"),
    }


NAMES = WeightNames(
    prefix="transformer.",
    layers="h.",
    top={"word_embeddings": "embed_tokens", "ln_f": "norm"},
    layer=MEGATRON_LAYER,
)

ARCHITECTURES = [
    decoder_family("FalconForCausalLM", ["tiiuae/falcon-7b-instruct"], falcon_fields, names=NAMES)
]
"""The architectures of this module, for the registry."""
