"""Falcon: fused projections, attention and MLP in parallel, rotation or ALiBi."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt.gpt_names import MEGATRON_LAYER
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.blocks.attention import alibi_slopes
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES", "falcon_decoder"]


_KEYS = {
    "intermediate_size": "",
    "num_key_value_heads": "",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation",
    "head_dim": "",
}


def falcon_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Falcon."""
    alibi, grouped = keys.flag("alibi"), keys.flag("new_decoder_architecture")
    config = read_decoder(
        keys,
        _KEYS,
        tied=True,
        gated=False,
        activation="gelu",
        eps=1e-5,
        rotates=not alibi,
    )
    hidden, attention = config.hidden_size, config.attention
    heads = attention.num_attention_heads
    shared = keys.flag("multi_query", True) and not grouped
    # new models state them; older ones have one for all queries, or one for each
    kv_heads = keys.integer("num_kv_heads", 1, heads, heads) if grouped else 1 if shared else heads
    if heads % kv_heads:
        raise keys.error("num_kv_heads", f"a divisor of num_attention_heads, which is {heads}")
    parallel = grouped or keys.flag("parallel_attn", True)
    norms = keys.integer("num_ln_in_parallel_attn", 1, 2, 2 if grouped else 1)
    shares_norm = parallel and norms == 1
    # the biases are scaled with the scores
    slopes = alibi_slopes(heads, factor=attention.head_dim**-0.5) if alibi else None
    config = with_biases(config, keys, "bias", mlp="bias")
    config = config.with_attention(num_key_value_heads=kv_heads, alibi_slopes=slopes)
    config = config.with_mlp(size=keys.integer("ffn_hidden_size", 1, LONGEST_SEQUENCE, 4 * hidden))
    config = config.with_blocks(
        norms=("attention_input",) if shares_norm else ("attention_input", "mlp_input"),
        parallel=parallel,
    )
    norm = NormForm("layer", bias=True)
    # with one KV head all queries come first, else each KV head follows its own
    return replace(config, norm=norm, qkv_layout="rows" if shared else "heads")


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
        "alibi": metadata.greatest_number("attention.max_alibi_bias", 0.0) > 0,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    """Files state what differs from the first models."""
    slopes, parallel = config.attention.alibi_slopes, config.blocks[0].parallel
    alibi = {} if slopes is None else {"attention.max_alibi_bias": 8.0}
    return alibi if parallel else {**alibi, "use_parallel_residual": False}


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
    fused_projections=("qkv_proj",),
)

ARCHITECTURES = [
    decoder_family(
        "FalconForCausalLM", ["tiiuae/falcon-7b-instruct"], falcon_decoder, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
