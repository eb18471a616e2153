"""GPT-NeoX and Pythia: attention and MLP in parallel, partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt.gpt_names import MEGATRON_LAYER
from max.pipelines.architectures.gpt.stablelm import read_parallel, write_parallel
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def gpt_neox_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A GPT-NeoX."""
    # transformers reads the usual names in ``rope_parameters`` only
    names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    config = read_decoder(
        keys.with_names(names),
        {"rms_norm_eps": "layer_norm_eps"},
        gated=False,
        activation="gelu",
        eps=1e-5,
        partial_rotation=0.25,
    )
    config = with_biases(config, keys, default=True).with_mlp(bias=True)
    config = config.with_blocks(parallel=keys.flag("use_parallel_residual", True))
    return replace(config, norm=NormForm("layer", bias=True), qkv_layout="heads")


NAMES = WeightNames(
    prefix="gpt_neox.",
    top={"embed_in": "embed_tokens", "final_layer_norm": "norm", "embed_out": "lm_head"},
    layer=MEGATRON_LAYER,
    unused_buffers=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
)

GGUF = GGUFForm(
    "gptneox", "gpt_neox", read=read_parallel, write=write_parallel, fused_projections=("qkv_proj",)
)

ARCHITECTURES = [
    decoder_family(
        "GPTNeoXForCausalLM", ["EleutherAI/pythia-160m"], gpt_neox_decoder, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
