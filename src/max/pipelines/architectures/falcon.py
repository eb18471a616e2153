"""Falcon: fused projections, attention and MLP in parallel, rotation or ALiBi."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt_names import MEGATRON_LAYER
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.alibi import alibi_slopes
from max.pipelines.models.config_fields import Fields, base_fields, biases
from max.pipelines.models.decoder_config import DecoderConfig
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


def _read(metadata: Metadata) -> dict[str, Any]:
    """The keys of config.json that files state in another way."""
    parallel = metadata.flag("use_parallel_residual", True)
    return {
        "num_ln_in_parallel_attn": 1 + ("blk.0.attn_norm_2.weight" in metadata.file.tensors),
        "new_decoder_architecture": parallel,
        "parallel_attn": parallel,
        "multi_query": metadata.config.get("num_key_value_heads") == 1,
        "alibi": metadata.greatest("attention.max_alibi_bias", 0.0) > 0,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    """Files state what differs from the first models."""
    alibi = {} if config.alibi_slopes is None else {"attention.max_alibi_bias": 8.0}
    return alibi if config.parallel else {**alibi, "use_parallel_residual": False}


GGUF = GGUFForm(
    "falcon",
    "falcon",
    keys={
        "num_key_value_heads": "num_kv_heads",
        "layer_norm_eps": "layer_norm_epsilon",
        "intermediate_size": "ffn_hidden_size",
        "attention_bias": "bias",
    },
    read=_read,
    write=_write,
    # if a layer has two norms, `attn_norm` is the MLP's
    alternative={"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"},
    fused=("qkv_proj",),
)

ARCHITECTURES = [
    decoder_family(
        "FalconForCausalLM", ["tiiuae/falcon-7b-instruct"], falcon_fields, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
