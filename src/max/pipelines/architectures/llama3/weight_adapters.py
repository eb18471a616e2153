"""From the names of checkpoints to those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from max.driver import Tensor
from max.graph.weights import WeightData

__all__ = ["convert_gguf_state_dict", "convert_safetensor_state_dict"]

PREFIX = "model."
"""Hugging Face puts all but the output layer into a part of this name."""

UNUSED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Buffers that old checkpoints have and that are computed here."""


def convert_safetensor_state_dict(
    state_dict: Mapping[str, Any], **kwargs: Any
) -> dict[str, WeightData]:
    """The weights of a safetensors or PyTorch checkpoint by the names of `Llama3`.

    ==============================================  ==============================================
    checkpoint                                      model
    ==============================================  ==============================================
    ``model.embed_tokens.weight``                   ``embed_tokens.weight``
    ``model.layers.N.self_attn.q_proj.weight`` …    ``layers.N.self_attn.q_proj.weight`` …
    ``model.norm.weight``                           ``norm.weight``
    ``lm_head.weight``                              ``lm_head.weight``
    ==============================================  ==============================================

    Args:
        state_dict: The checkpoint's weights by name (`WeightData`, or what has ``data()``).
        kwargs: What pipelines give to adapters of other architectures; not read.
    """
    converted: dict[str, WeightData] = {}
    for name, value in state_dict.items():
        if name.endswith(UNUSED):
            continue
        converted[name.removeprefix(PREFIX)] = (
            value if isinstance(value, WeightData) else value.data()
        )
    return converted


GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
GGUF_UNUSED = ("rope_freqs.weight",)
"""Tables of GGUF files that are computed here."""


def convert_gguf_state_dict(state_dict: Mapping[str, Any], **kwargs: Any) -> dict[str, WeightData]:
    """The weights of a GGUF file by the names of `Llama3`.

    ==============================================  ==============================================
    GGUF                                            model
    ==============================================  ==============================================
    ``token_embd.weight``                           ``embed_tokens.weight``
    ``blk.N.attn_q.weight`` …                       ``layers.N.self_attn.q_proj.weight`` …
    ``blk.N.ffn_gate.weight`` …                     ``layers.N.mlp.gate_proj.weight`` …
    ``blk.N.attn_norm.weight``                      ``layers.N.input_layernorm.weight``
    ``blk.N.ffn_norm.weight``                       ``layers.N.post_attention_layernorm.weight``
    ``output_norm.weight``                          ``norm.weight``
    ``output.weight``                               ``lm_head.weight``
    ==============================================  ==============================================

    Rows of queries and keys stay where they are: pairs that rotate together are neighbours in GGUF
    files, so that the model is built with ``interleaved_rope``.

    Args:
        state_dict: The file's weights by name (`WeightData`, or what has ``data()``).
        kwargs: What pipelines give to adapters of other architectures; not read.

    Raises:
        ValueError: The file has a weight that a Llama has not.
    """
    converted: dict[str, WeightData] = {}
    for name, value in state_dict.items():
        if name.endswith(GGUF_UNUSED):
            continue
        parts = name.split(".")
        if parts[0] == "blk" and len(parts) == 4 and parts[2] in GGUF_LAYER:
            renamed = f"layers.{parts[1]}.{GGUF_LAYER[parts[2]]}.{parts[3]}"
        elif len(parts) == 2 and parts[0] in GGUF_TOP:
            renamed = f"{GGUF_TOP[parts[0]]}.{parts[1]}"
        else:
            raise ValueError(f"the GGUF file has the weight {name!r}, which a Llama has not")
        converted[renamed] = value if isinstance(value, WeightData) else value.data()
    return converted


def gptq_v1(state_dict: Mapping[str, WeightData], bits: int) -> dict[str, WeightData]:
    """A GPTQ checkpoint of format ``gptq_v2``, which stores zero points as they are, in that of ``gptq``: less 1.

    Args:
        state_dict: The weights.
        bits: Of an integer.
    """
    converted = dict(state_dict)
    fields = np.arange(0, 32, bits, dtype=np.uint32)
    mask = np.uint32(2**bits - 1)
    for name, value in state_dict.items():
        if name.endswith(".qzeros"):
            words = Tensor.from_dlpack(value.data).to_numpy().view(np.uint32)
            less = ((words[..., None] >> fields & mask) - np.uint32(1) & mask) << fields
            packed = np.bitwise_or.reduce(less, -1).view(np.int32)
            converted[name] = WeightData.from_numpy(packed, value.name)
    return converted
