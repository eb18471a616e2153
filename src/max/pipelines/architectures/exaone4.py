"""EXAONE 4: normalised outputs of layers, QK norm; layers without a window are not rotated."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields, layers_of_type, window
from max.pipelines.models.norms import QKNorm
from max.pipelines.models.weight_names import OUTPUT_NORMS, WeightNames

__all__ = ["ARCHITECTURES"]


def exaone4_fields(keys: ConfigKeys) -> Fields:
    """The fields of an EXAONE 4's config."""
    fields = base_fields(keys, eps=1e-5)
    layers, sliding = fields["num_layers"], window(keys, 4096)
    pattern = keys.value("sliding_window_pattern")
    # a string such as LLLG has a letter per layer of a period: local or global
    period = pattern if isinstance(pattern, str) else "L" * (int(pattern or 4) - 1) + "G"
    full = frozenset(index for index in range(layers) if period[index % len(period)] == "G")
    full = layers_of_type(keys, layers, full) if sliding is not None else frozenset(range(layers))
    return fields | {
        "norm_places": ("attention_output", "mlp_output"),
        "qk_norm": QKNorm(),
        "sliding_window": sliding,
        "full_attention_layers": full,
        "unrotated_layers": frozenset[int]() if sliding is None else full,
    }


ARCHITECTURES = [
    decoder_family(
        "Exaone4ForCausalLM",
        ["LGAI-EXAONE/EXAONE-4.0-1.2B"],
        exaone4_fields,
        names=WeightNames(layer=OUTPUT_NORMS),
    )
]
"""The architectures of this module, for the registry."""
