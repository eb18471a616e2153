"""Llama 4 (text): attention in chunks, layers without rotation, experts weighed by sigmoids."""

from __future__ import annotations

from typing import Any

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.metadata_writer import period_of, refusal_of
from max.pipelines.models.blocks.attention import AttentionForm, QueryGrowth
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.norms import NormForm, QKNorm
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import layers_of_type, unrotated_layers
from max.pipelines.models.decoder.read_config import read_decoder, with_biases, with_windows
from max.pipelines.models.decoder.read_experts import layer_list
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def llama4_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Llama 4: chunks in rotated layers, experts in some."""
    names = {"intermediate_size": "intermediate_size_mlp"}
    config = read_decoder(keys, names, eps=1e-5, longest=131072, theta=5e5)
    layers = config.num_layers
    step = keys.integer("interleave_moe_layer_step", 1, LONGEST_SEQUENCE, 1)
    routed = layer_list(keys, "moe_layers", range(step - 1, layers, step))
    count = keys.integer("num_local_experts", 1, LONGEST_SEQUENCE, 16)
    size = keys.integer("intermediate_size", 1, LONGEST_SEQUENCE)
    chosen = keys.integer("num_experts_per_tok", 1, count, 1)
    routing, unrotated = ExpertRouting("sigmoid"), unrotated_layers(keys, layers)
    # the first files state a count instead of true
    tuned = keys.value("attn_temperature_tuning")
    grows = bool(tuned) if type(tuned) is int else keys.flag("attn_temperature_tuning", True)
    growth = keys.number("attn_scale", default=0.1), keys.integer("floor_scale", 1, 2**31, 8192)
    norm = QKNorm(NormForm(weight=False), after_rotation=True)
    config = with_biases(config, keys).with_attention(
        interleaved=True, qk_norm=norm if keys.flag("use_qk_norm", True) else None
    )
    chunk = keys.integer("attention_chunk_size", 1, LONGEST_SEQUENCE, None)
    full = layers_of_type(keys, layers, unrotated, other="chunked_attention")
    config = with_windows(config, chunk, full, chunked=True)
    grown = QueryGrowth(*growth, 1) if grows else None
    config = config.with_attention(unrotated, rope=None, qk_norm=None, query_growth=grown)
    experts = Experts(count, chosen, size, routing, size, weights_first=True)
    return config.with_experts(experts, {*range(layers)} - routed)


_EXPERTS = {part: f"mlp.experts.{part}.weight" for part in ("gate_up_proj", "down_proj")}
_LAYER = {"feed_forward.router": "mlp.gate.gate_score", "feed_forward.shared_expert": "mlp.shared"}
_LAYER |= {f"feed_forward.experts.{part}": own for part, own in _EXPERTS.items()}
NAMES = WeightNames(
    layer={**_LAYER, "feed_forward": "mlp"}, transposed_weights=(*_EXPERTS.values(),)
)
_REPOS = ["meta-llama/Llama-4-Scout-17B-16E-Instruct"]
_LARGEST_COUNT = 128
"""The number of experts of the published model without norms of heads."""


def _read(metadata: Metadata) -> dict[str, Any]:
    """As in llama.cpp: Maverick has 128 experts and no QK norm, Scout has QK norm."""
    return {"use_qk_norm": metadata.config.get("num_experts") != _LARGEST_COUNT}


def _write(config: DecoderConfig) -> dict[str, Any]:
    """Refuses what differs from the published models, as files do not state it."""
    forms, experts = config.every(AttentionForm), config.first_form(Experts)
    count = 0 if experts is None else experts.count
    unrotated = [index for index, form in enumerate(forms) if form.rope is None]
    growths = {form.query_growth for form in forms if form.rope is None}
    has_norms = any(form.qk_norm is not None for form in forms)
    fixed = (
        ({form.window for form in forms} - {None}, {8192}, "chunks of other lengths than 8192"),
        (unrotated, [i for i in range(len(forms)) if i % 4 == 3], "other unrotated layers than each fourth"),
        (growths - {QueryGrowth(0.1, 8192, 1)}, set(), "other growths of queries than the published"),
        (has_norms, count != _LARGEST_COUNT, "norms of heads of 128 experts, nor their lack elsewhere"),
    )  # fmt: skip
    for value, published, difference in fixed:
        if value != published:
            raise refusal_of("llama4", difference)
    routed = [isinstance(block.feed_forward, Experts) for block in config.blocks]
    step = period_of("llama4", routed, "experts")
    return {"interleave_moe_layer_step": step}


GGUF = GGUFForm(
    "llama4",
    "llama4_text",
    keys={
        "num_experts": "num_local_experts",
        "intermediate_size": "intermediate_size_mlp",
        "moe_intermediate_size": "intermediate_size",
        "moe_layer_interval": "interleave_moe_layer_step",
    },
    constants={
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    experts=ExpertKeys(weights=False, dense_layers="written"),
    read=_read,
    write=_write,
)

ARCHITECTURES = [
    decoder_family("Llama4ForCausalLM", _REPOS, llama4_decoder, names=NAMES, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
