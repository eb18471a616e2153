"""Llama 4 (text): attention in chunks, layers without rotation, experts weighed by sigmoids."""

from __future__ import annotations

from typing import Any

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.metadata_writer import period_of, refused
from max.pipelines.models.config_fields import (
    Fields,
    base_fields,
    biases,
    layers_of_type,
    unrotated_layers,
)
from max.pipelines.models.decoder_config import DecoderConfig, QueryGrowth
from max.pipelines.models.expert_fields import layer_list
from max.pipelines.models.experts import Experts
from max.pipelines.models.norms import NormForm, QKNorm
from max.pipelines.models.rope import LONGEST_SEQUENCE
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def llama4_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Llama 4's config."""
    names = {"intermediate_size": "intermediate_size_mlp"}
    fields = base_fields(keys, names, eps=1e-5, longest=131072, theta=5e5)
    layers = fields["num_layers"]
    step = keys.integer("interleave_moe_layer_step", 1, LONGEST_SEQUENCE, 1)
    dense = frozenset(range(layers)) - layer_list(keys, "moe_layers", range(step - 1, layers, step))
    count = keys.integer("num_local_experts", 1, LONGEST_SEQUENCE, 16)
    size = keys.integer("intermediate_size", 1, LONGEST_SEQUENCE)
    chosen = keys.integer("num_experts_per_tok", 1, count, 1)
    routing, unrotated = ExpertRouting("sigmoid"), unrotated_layers(keys, layers)
    # the first files state a count instead of true
    tuned = keys.value("attn_temperature_tuning")
    grows = bool(tuned) if type(tuned) is int else keys.flag("attn_temperature_tuning", True)
    growth = keys.number("attn_scale", default=0.1), keys.integer("floor_scale", 1, 2**31, 8192)
    norm = QKNorm(NormForm(weight=False), after_rotation=True, rotated_only=True)
    return fields | {
        **biases(keys),
        "interleaved_rope": True,
        "unrotated_layers": unrotated,
        "qk_norm": norm if keys.flag("use_qk_norm", True) else None,
        "query_growth": QueryGrowth(*growth, 1, True) if grows else None,
        "chunked": True,
        "sliding_window": keys.integer("attention_chunk_size", 1, LONGEST_SEQUENCE, None),
        "full_attention_layers": layers_of_type(keys, layers, unrotated, other="chunked_attention"),
        "experts": Experts(count, chosen, size, routing, size, dense_layers=dense, weights_first=True),
    }  # fmt: skip


_EXPERTS = {part: f"mlp.experts.{part}.weight" for part in ("gate_up_proj", "down_proj")}
_LAYER = {"feed_forward.router": "mlp.gate.gate_score", "feed_forward.shared_expert": "mlp.shared"}
_LAYER |= {f"feed_forward.experts.{part}": own for part, own in _EXPERTS.items()}
NAMES = WeightNames(layer={**_LAYER, "feed_forward": "mlp"}, transposed=(*_EXPERTS.values(),))
_REPOS = ["meta-llama/Llama-4-Scout-17B-16E-Instruct"]
_LARGEST_COUNT = 128
"""The number of experts of the published model without norms of heads."""


def _read(metadata: Metadata) -> dict[str, Any]:
    """As in llama.cpp: Maverick has 128 experts and no QK norm, Scout has QK norm."""
    return {"use_qk_norm": metadata.config.get("num_experts") != _LARGEST_COUNT}


def _write(config: DecoderConfig) -> dict[str, Any]:
    """Refuses what differs from the published models, as files do not state it."""
    layers = range(config.num_layers)
    dense = frozenset(layers) if config.experts is None else config.experts.dense_layers
    count = 0 if config.experts is None else config.experts.count
    fixed = (
        (config.sliding_window, 8192, "chunks of other lengths than 8192"),
        (config.unrotated_layers, {i for i in layers if i % 4 == 3}, "other unrotated layers than each fourth"),
        (config.query_growth, QueryGrowth(0.1, 8192, 1, True), "other growths of queries than the published"),
        (config.qk_norm is None, count == _LARGEST_COUNT, "norms of heads of 128 experts, nor their lack elsewhere"),
    )  # fmt: skip
    for value, published, difference in fixed:
        if value != published:
            raise refused("llama4", difference)
    step = period_of("llama4", [i not in dense for i in layers], "experts")
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

ARCHITECTURES = [decoder_family("Llama4ForCausalLM", _REPOS, llama4_fields, names=NAMES, gguf=GGUF)]
"""The architectures of this module, for the registry."""
