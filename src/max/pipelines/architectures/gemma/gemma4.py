"""Gemma 4 (text): heads of another size in layers without a window, keys as values, experts beside the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.metadata_writer import one_or_list, refusal_of
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.gated_block import GatedBlock
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import LARGEST_SIZE
from max.pipelines.models.decoder.read_per_layer import (
    PER_LAYER_NAMES,
    PER_LAYER_TOP,
    read_per_layer_decoder,
    with_full_heads,
)
from max.pipelines.models.decoder.weight_names import SANDWICH_NORMS, WeightNames

__all__ = ["ARCHITECTURES"]


def gemma4_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Gemma 4."""
    # GGUF files state the kind of each layer
    ends_full = not keys.value("from_gguf")
    config = with_full_heads(read_per_layer_decoder(keys, 6, 0, ends_full), keys, ends_full)
    inner = keys.integer("intermediate_size", 1, LARGEST_SIZE, 9216)
    config = config.with_mlp(size=inner)
    if keys.flag("use_double_wide_mlp"):
        forms = enumerate(config.every(AttentionForm))
        shared = [index for index, form in forms if form.shared_with is not None]
        config = config.with_mlp(shared, size=2 * inner)
    beside: Experts | None = None
    if keys.flag("enable_moe_block"):
        count = keys.integer("num_experts", 1, LARGEST_SIZE)
        chosen = keys.integer("top_k_experts", 1, count)
        size = keys.integer("moe_intermediate_size", 1, LARGEST_SIZE)
        mlp = config.first_form(MLPForm)
        assert mlp is not None
        routing = ExpertRouting(normalized=True)
        beside = Experts(count, chosen, size, routing, activation=mlp.activation)
    inputs = config.per_layer_inputs
    blocks = tuple(
        GatedBlock(**vars(block), experts_beside=beside, inputs=inputs) for block in config.blocks
    )
    return replace(config, blocks=blocks)


_BESIDE = {
    "experts.gate_up_proj": "beside.experts.gate_up_proj.weight",
    "experts.down_proj": "beside.experts.down_proj.weight",
    "router.scale": "beside.scale",
    "router.per_expert_scale": "beside.per_expert_scale",
    "router.proj": "beside.gate.gate_score",
    "pre_feedforward_layernorm_2": "beside.input_norm",
    "post_feedforward_layernorm_2": "beside.output_norm",
    "post_feedforward_layernorm_1": "beside.mlp_norm",
}
NAMES = WeightNames(
    top=PER_LAYER_TOP,
    layer={**SANDWICH_NORMS, **PER_LAYER_NAMES, **_BESIDE},
)


def _read(metadata: Metadata) -> dict[str, Any]:
    """The keys that depend on the kinds of layers: with a window, and without."""
    windowed = [bool(value) for value in metadata.by_layer("attention.sliding_window_pattern")]
    shared = metadata.integer("attention.shared_kv_layers", 0)
    heads = metadata.by_layer("attention.head_count_kv")
    sizes = metadata.by_layer("feed_forward_length")
    of_kind: dict[bool, int] = {}
    for index, (local, number) in enumerate(zip(windowed, heads, strict=True)):
        if of_kind.setdefault(local, number) != number:
            expected = f"{of_kind[local]} for layer {index}"
            raise metadata.error("attention.head_count_kv", heads, expected)
    inner, wide, own = sizes[0], sizes[0] != sizes[-1], metadata.layers - shared
    if own < 1:
        raise metadata.error("attention.shared_kv_layers", shared, f"fewer than {metadata.layers}")
    expected_sizes = [inner] * own + [2 * inner if wide else inner] * shared
    if sizes != expected_sizes:
        raise metadata.error("feed_forward_length", sizes, str(expected_sizes))
    stored, full = metadata.file.tensors, [i for i in range(own) if not windowed[i]]
    rows = stored.get("per_layer_token_embd.weight")
    return {
        "intermediate_size": inner,
        "use_double_wide_mlp": wide,
        "layer_types": [f"{'sliding' if local else 'full'}_attention" for local in windowed],
        "num_kv_shared_layers": shared,
        "num_key_value_heads": of_kind.get(True, of_kind.get(False)),
        "num_global_key_value_heads": of_kind.get(False),
        "head_dim": metadata.integer(
            "attention.key_length_swa", metadata.integer("attention.key_length")
        ),
        "global_head_dim": metadata.integer("attention.key_length"),
        # layers without a value projection use their keys as values
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in stored for index in full),
        "enable_moe_block": metadata.integer("expert_count", 0) > 0,
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": rows.shape[0] if rows and rows.shape else 1,
        "rope_parameters": metadata.local_rotation(),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    """The differences between layers with and without a window."""
    forms, inputs = config.every(AttentionForm), config.per_layer_inputs
    own = sum(form.shared_with is None for form in forms)
    windowed = [form.window is not None for form in forms]
    # llama.cpp takes shared keys from the last two layers with keys of their own
    if own < len(forms) and windowed[max(own - 2, 0) : own] != [True, False]:
        raise refusal_of(
            "gemma4",
            "shared keys of other layers than the last with a window and the last without",
        )
    # the size of heads in the last layer of each kind
    of_kind = {form.window is not None: form.head_dim for form in forms}
    dim, local_dim = (of_kind.get(local, forms[0].head_dim) for local in (False, True))
    return {
        "attention.head_count_kv": one_or_list([form.num_key_value_heads for form in forms]),
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.key_length_swa": local_dim,
        "attention.value_length_swa": local_dim,
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": len(forms) - own,
        "embedding_length_per_layer_input": 0 if inputs is None else inputs.size,
        "rope.dimension_count": dim,
        "rope.dimension_count_swa": local_dim,
    }


GGUF = GGUFForm(
    "gemma4",
    "gemma4_text",
    keys={"num_experts_per_tok": "top_k_experts"},
    by_layer=("feed_forward_length", "attention.head_count_kv", "attention.key_length"),
    read=_read,
    write=_write,
    layer={
        "pre_ffw_norm_2": "beside.input_norm",
        "post_ffw_norm_1": "beside.mlp_norm",
        "post_ffw_norm_2": "beside.output_norm",
        "ffn_gate_inp": "beside.gate.gate_score",
        "ffn_gate_inp.scale": "beside.scale",
        "ffn_gate_up_exps": "beside.experts.gate_up_proj",
        "ffn_down_exps": "beside.experts.down_proj",
        "ffn_down_exps.scale": "beside.per_expert_scale",
    },
)

ARCHITECTURES = [
    decoder_family(
        "Gemma4ForCausalLM", ["google/gemma-4-E2B-it"], gemma4_decoder, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
