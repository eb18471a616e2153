"""PhiMoE: layer norms, biases, experts selected by sparsemixer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.mistral.mixtral import NAMES
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import window
from max.pipelines.models.decoder.read_config import read_decoder, with_biases, with_windows

__all__ = ["ARCHITECTURES"]


def phimoe_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A PhiMoE."""
    config = read_decoder(keys, eps=1e-5, longest=131072, theta=1e6)
    (rope, *_) = config.ropes
    if rope.kind not in ("default", "longrope"):
        raise keys.error("rope_scaling", "the kind longrope, or none")
    if rope.kind == "longrope":
        # transformers uses the short factors for all lengths, and both magnitudes
        scaling = {**rope.parameters, "long_factor": rope.parameters["short_factor"]}
        config = config.with_attention(rope=replace(rope, parameters=scaling))
    count = keys.integer("num_local_experts", 2, LONGEST_SEQUENCE)
    chosen = keys.integer("num_experts_per_tok", 2, 2, 2)
    jitter = keys.number("router_jitter_noise", least=0, default=0.01)
    routing = ExpertRouting("sparsemixer", jitter=jitter)
    inner = keys.integer("intermediate_size", 1, LONGEST_SEQUENCE)
    config = with_windows(with_biases(config, keys), window(keys))
    config = config.with_experts(Experts(count, chosen, inner, routing))
    norm = NormForm("layer", bias=True)
    return replace(config, norm=norm, output_bias=keys.flag("lm_head_bias"))


def _write(config: DecoderConfig) -> dict[str, Any]:
    """llama.cpp requires the epsilon of RMS norms, too."""
    return {"attention.layer_norm_rms_epsilon": float(config.norm_eps)}


# adapters have the names of modules
PHIMOE_NAMES = replace(
    NAMES, layer={**NAMES.layer, "mlp.router.weight": "mlp.gate.gate_score.weight"}
)
"""PhiMoE's names of weights."""

GGUF = GGUFForm(
    "phimoe",
    "phimoe",
    keys={"num_experts": "num_local_experts", "output_bias": "lm_head_bias"},
    experts=ExpertKeys(weights=False),
    write=_write,
)

ARCHITECTURES = [
    decoder_family(
        name, ["microsoft/Phi-3.5-MoE-instruct"], phimoe_decoder, names=PHIMOE_NAMES, gguf=gguf
    )
    # the name in the model's own files, and the name in files of transformers
    for name, gguf in (
        ("PhiMoEForCausalLM", replace(GGUF, reads=False)),
        ("PhimoeForCausalLM", GGUF),
    )
]
"""The architectures of this module, for the registry."""
