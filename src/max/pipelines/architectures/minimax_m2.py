"""MiniMax M2: experts chosen by sigmoids, QK norm over all heads, partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.mixtral import NAMES as MIXTRAL_NAMES
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields
from max.pipelines.models.experts import Experts
from max.pipelines.models.norms import QKNorm
from max.pipelines.models.rope import LONGEST_SEQUENCE

__all__ = ["ARCHITECTURES"]


def minimax_m2_fields(keys: ConfigKeys) -> Fields:
    """The fields of a MiniMax M2's config."""
    size = keys.integer("head_dim", 2, LONGEST_SEQUENCE, 128)
    share = keys.integer("rotary_dim", 2, size, size) / size
    fields = base_fields(keys, head_dim=128, eps=1e-6, partial_rotation=share)
    count = keys.integer("num_local_experts", 1, LONGEST_SEQUENCE)
    routing = ExpertRouting("sigmoid", normalised=True, has_correction=True)
    chosen = keys.integer("num_experts_per_tok", 1, count)
    return fields | {
        "qk_norm": QKNorm(over="all"),
        "experts": Experts(count, chosen, fields["intermediate_size"], routing),
    }


CORRECTION = "block_sparse_moe.e_score_correction_bias"
NAMES = replace(
    MIXTRAL_NAMES, layer={CORRECTION: "mlp.gate.e_score_correction_bias", **MIXTRAL_NAMES.layer}
)

GGUF = GGUFForm(
    "minimax-m2",
    "minimax_m2",
    keys={"num_experts": "num_local_experts"},
    experts=ExpertKeys(scoring=True),
)

ARCHITECTURES = [
    decoder_family(
        "MiniMaxM2ForCausalLM", ["MiniMaxAI/MiniMax-M2"], minimax_m2_fields, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
