"""Hunyuan (experts): the dense model's attention, experts selected by a softmax, and a shared expert."""

from __future__ import annotations

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.hunyuan.hunyuan import NAMES as DENSE_NAMES
from max.pipelines.architectures.hunyuan.hunyuan import hunyuan_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def hunyuan_moe_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Hunyuan with experts; per-layer numbers that differ are refused."""
    config = hunyuan_decoder(keys)
    name = "num_experts" if keys.value("num_experts") is not None else "num_local_experts"
    count = keys.same_integer(name, 1, LONGEST_SEQUENCE)
    top = "moe_topk" if keys.value("moe_topk") is not None else "num_experts_per_tok"
    size = keys.integer("intermediate_size", 1, LONGEST_SEQUENCE)
    chosen = keys.same_integer(top, 1, count)
    return config.with_experts(Experts(count, chosen, size, ExpertRouting(normalized=True), size))


NAMES = WeightNames(
    layer={
        **DENSE_NAMES.layer,
        "mlp.gate.wg": "mlp.gate.gate_score",
        "mlp.shared_mlp": "mlp.shared",
    },
    stacks={"mlp.experts": "mlp.experts"},
)

GGUF = GGUFForm("hunyuan-moe", "hunyuan_v1_moe", experts=ExpertKeys(shared_count=True))

ARCHITECTURES = [
    decoder_family(
        "HunYuanMoEV1ForCausalLM",
        ["tencent/Hunyuan-A13B-Instruct"],
        hunyuan_moe_decoder,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
