"""EXAONE 4: normalized outputs of layers, QK norm; layers without a window are not rotated."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.blocks.norms import QKNorm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import layers_of_type, window
from max.pipelines.models.decoder.read_config import read_decoder, with_windows
from max.pipelines.models.decoder.weight_names import OUTPUT_NORMS, WeightNames

__all__ = ["ARCHITECTURES"]


def exaone4_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An EXAONE 4: with windows, layers without one are not rotated."""
    config = read_decoder(keys, eps=1e-5)
    layers, sliding = config.num_layers, window(keys, 4096)
    pattern = keys.value("sliding_window_pattern")
    # a string such as LLLG has a letter per layer of a period: local or global
    period = pattern if isinstance(pattern, str) else "L" * (int(pattern or 4) - 1) + "G"
    full = frozenset(index for index in range(layers) if period[index % len(period)] == "G")
    config = config.with_blocks(norms=("attention_output", "mlp_output"))
    config = config.with_attention(qk_norm=QKNorm())
    if sliding is None:
        return config
    full = layers_of_type(keys, layers, full)
    return with_windows(config, sliding, full).with_attention(full, rope=None)


def _read(metadata: Metadata) -> dict[str, Any]:
    """The default of the config class is a window."""
    if "sliding_window" in metadata.config:
        return {}
    return {"sliding_window": None, "layer_types": ["full_attention"] * metadata.layers}


GGUF = GGUFForm("exaone4", "exaone4", read=_read, window_period=4)

ARCHITECTURES = [
    decoder_family(
        "Exaone4ForCausalLM",
        ["LGAI-EXAONE/EXAONE-4.0-1.2B"],
        exaone4_decoder,
        names=WeightNames(layer=OUTPUT_NORMS),
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
