"""PhiMoE: layer norms, biases, experts selected by sparsemixer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.mixtral import NAMES
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases, window
from max.pipelines.models.decoder_config import DecoderConfig
from max.pipelines.models.experts import Experts
from max.pipelines.models.norms import NormForm
from max.pipelines.models.rope import LONGEST_SEQUENCE

__all__ = ["ARCHITECTURES"]


def phimoe_fields(keys: ConfigKeys) -> Fields:
    """The fields of a PhiMoE's config."""
    fields = base_fields(keys, eps=1e-5, longest=131072, theta=1e6)
    if fields["rope"].kind not in ("default", "longrope"):
        raise keys.error("rope_scaling", "the kind longrope, or none")
    if fields["rope"].kind == "longrope":
        # transformers uses the short factors for all lengths, and both magnitudes
        scaling = fields["rope"].parameters
        scaling = {**scaling, "long_factor": scaling["short_factor"]}
        fields["rope"] = replace(fields["rope"], parameters=scaling)
    count = keys.integer("num_local_experts", 2, LONGEST_SEQUENCE)
    chosen = keys.integer("num_experts_per_tok", 2, 2, 2)
    jitter = keys.number("router_jitter_noise", least=0, default=0.01)
    routing = ExpertRouting("sparsemixer", jitter=jitter)
    return (
        fields
        | biases(keys)
        | {
            "norm": NormForm("layer", bias=True),
            "output_bias": keys.flag("lm_head_bias"),
            "experts": Experts(count, chosen, fields["intermediate_size"], routing),
            "sliding_window": window(keys),
        }
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    """llama.cpp requires the epsilon of RMS norms, too."""
    return {"attention.layer_norm_rms_epsilon": float(config.norm_eps)}


GGUF = GGUFForm(
    "phimoe",
    "phimoe",
    keys={"num_experts": "num_local_experts", "output_bias": "lm_head_bias"},
    experts=ExpertKeys(weights=False),
    write=_write,
)

ARCHITECTURES = [
    decoder_family(name, ["microsoft/Phi-3.5-MoE-instruct"], phimoe_fields, names=NAMES, gguf=gguf)
    # the name in the model's own files, and the name in files of transformers
    for name, gguf in (
        ("PhiMoEForCausalLM", replace(GGUF, reads=False)),
        ("PhimoeForCausalLM", GGUF),
    )
]
"""The architectures of this module, for the registry."""
