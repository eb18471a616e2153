"""From the names of checkpoints to those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.graph.weights import WeightData

__all__ = ["convert_state_dict"]

PREFIX = "model."
"""Hugging Face puts all but the output layer into a part of this name."""

UNUSED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Buffers that old checkpoints have and that are computed here."""


def convert_state_dict(state_dict: Mapping[str, Any], **kwargs: Any) -> dict[str, WeightData]:
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
