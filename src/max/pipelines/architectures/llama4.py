"""Llama 4 (text): attention in chunks, layers without rotation, experts weighed by sigmoids."""

from __future__ import annotations

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import (
    Fields,
    base_fields,
    biases,
    layers_of_type,
    unrotated_layers,
)
from max.pipelines.models.decoder_config import QueryGrowth
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
ARCHITECTURES = [decoder_family("Llama4ForCausalLM", _REPOS, llama4_fields, names=NAMES)]
"""The architectures of this module, for the registry."""
