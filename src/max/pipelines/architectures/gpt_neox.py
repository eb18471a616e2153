"""GPT-NeoX and Pythia: attention and MLP in parallel, partly rotated heads."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt_names import MEGATRON_LAYER
from max.pipelines.architectures.stablelm import read_parallel, write_parallel
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields
from max.pipelines.models.norms import NormForm
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def gpt_neox_fields(keys: ConfigKeys) -> Fields:
    """The fields of a GPT-NeoX's config."""
    # transformers reads the usual names in ``rope_parameters`` only
    names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    fields = base_fields(
        keys.renamed(names),
        {"rms_norm_eps": "layer_norm_eps"},
        gated=False,
        activation="gelu",
        eps=1e-5,
        partial_rotation=0.25,
    )
    bias = keys.flag("attention_bias", True)
    return fields | {
        "norm": NormForm("layer", bias=True),
        "parallel": keys.flag("use_parallel_residual", True),
        "qkv_layout": "heads",
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": True,
    }


NAMES = WeightNames(
    prefix="gpt_neox.",
    top={"embed_in": "embed_tokens", "final_layer_norm": "norm", "embed_out": "lm_head"},
    layer=MEGATRON_LAYER,
    unused=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
)

GGUF = GGUFForm(
    "gptneox", "gpt_neox", read=read_parallel, write=write_parallel, fused=("qkv_proj",)
)

ARCHITECTURES = [
    decoder_family(
        "GPTNeoXForCausalLM", ["EleutherAI/pythia-160m"], gpt_neox_fields, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
