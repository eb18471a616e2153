"""StarCoder 2: layer norms, biases everywhere, MLPs without a gate."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases, window
from max.pipelines.models.norms import NormForm
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def starcoder2_fields(keys: ConfigKeys) -> Fields:
    """The fields of a StarCoder 2's config."""
    fields = base_fields(
        keys,
        {"rms_norm_eps": "norm_epsilon"},
        tied=True,
        gated=False,
        activation="gelu_pytorch_tanh",
        eps=1e-5,
        longest=4096,
    )
    return fields | {
        "norm": NormForm("layer", bias=True),
        **biases(keys, "use_bias", mlp="use_bias", default=True),
        "sliding_window": window(keys),
    }


NAMES = WeightNames(layer={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"})

GGUF = GGUFForm(
    "starcoder2",
    "starcoder2",
    keys={"layer_norm_eps": "norm_epsilon", "attention_bias": "use_bias"},
)

ARCHITECTURES = [
    decoder_family(
        "Starcoder2ForCausalLM",
        ["bigcode/starcoder2-3b"],
        starcoder2_fields,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
