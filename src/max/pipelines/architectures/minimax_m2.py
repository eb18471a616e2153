"""MiniMax M2: experts chosen by sigmoids, QK norm over all heads, partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.mistral.mixtral import NAMES as MIXTRAL_NAMES
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.norms import QKNorm
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder

__all__ = ["ARCHITECTURES"]


def minimax_m2_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A MiniMax M2."""
    size = keys.integer("head_dim", 2, LONGEST_SEQUENCE, 128)
    share = keys.integer("rotary_dim", 2, size, size) / size
    config = read_decoder(keys, head_dim=128, eps=1e-6, partial_rotation=share)
    count = keys.integer("num_local_experts", 1, LONGEST_SEQUENCE)
    routing = ExpertRouting("sigmoid", normalized=True, has_correction=True)
    chosen = keys.integer("num_experts_per_tok", 1, count)
    inner = keys.integer("intermediate_size", 1, LONGEST_SEQUENCE)
    config = config.with_attention(qk_norm=QKNorm(over="all"))
    return config.with_experts(Experts(count, chosen, inner, routing))


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
        "MiniMaxM2ForCausalLM", ["MiniMaxAI/MiniMax-M2"], minimax_m2_decoder, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
