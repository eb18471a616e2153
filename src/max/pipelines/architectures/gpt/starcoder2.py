"""StarCoder 2: layer norms, biases everywhere, MLPs without a gate."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import window
from max.pipelines.models.decoder.read_config import read_decoder, with_biases, with_windows
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def starcoder2_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A StarCoder 2."""
    config = read_decoder(
        keys,
        {"rms_norm_eps": "norm_epsilon"},
        tied=True,
        gated=False,
        activation="gelu_pytorch_tanh",
        eps=1e-5,
        longest=4096,
    )
    config = with_biases(config, keys, "use_bias", mlp="use_bias", default=True)
    config = with_windows(config, window(keys))
    return replace(config, norm=NormForm("layer", bias=True))


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
        starcoder2_decoder,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
