"""StableLM: layer norms, partly rotated heads, a norm for each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.blocks.norms import NormForm, QKNorm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES", "read_parallel", "write_parallel"]


def stablelm_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A StableLM."""
    names = {"rms_norm_eps": "layer_norm_eps"}
    config = read_decoder(keys, names, eps=1e-5, longest=4096, partial_rotation=0.25)
    parallel = keys.flag("use_parallel_residual")
    qk_norm = QKNorm(NormForm("layer"), "each_head") if keys.flag("qk_layernorm") else None
    config = config.with_attention(bias=keys.flag("use_qkv_bias"), qk_norm=qk_norm)
    config = config.with_blocks(
        norms=("attention_input",) if parallel else ("attention_input", "mlp_input"),
        parallel=parallel,
    )
    return replace(config, norm=NormForm("layer", bias=True))


NAMES = WeightNames(
    stacks={
        "self_attn.q_layernorm.norms": "self_attn.q_norm",
        "self_attn.k_layernorm.norms": "self_attn.k_norm",
    }
)


def read_parallel(metadata: Metadata) -> dict[str, Any]:
    """Whether attention and MLP read the same hidden states; files that do not state it have one norm then.

    Args:
        metadata: The file's metadata.
    """
    has_one_norm = "blk.0.ffn_norm.weight" not in metadata.file.tensors
    return {"use_parallel_residual": metadata.flag("use_parallel_residual", has_one_norm)}


def write_parallel(config: DecoderConfig) -> dict[str, Any]:
    """The metadata that `read_parallel` reads.

    Args:
        config: The shape of the model.
    """
    return {"use_parallel_residual": config.blocks[0].parallel}


GGUF = GGUFForm(
    "stablelm",
    "stablelm",
    keys={"attention_bias": "use_qkv_bias", "qk_norm": "qk_layernorm"},
    read=read_parallel,
    write=write_parallel,
)

ARCHITECTURES = [
    decoder_family(
        "StableLmForCausalLM",
        ["stabilityai/stablelm-2-1_6b"],
        stablelm_decoder,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
