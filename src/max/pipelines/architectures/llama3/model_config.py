"""The config.json of a Llama."""

from __future__ import annotations

from dataclasses import dataclass

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.model_types import with_type
from max.pipelines.models.blocks.rope import RopeConfig
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder

__all__ = ["Llama3Config", "RopeConfig"]


@dataclass(frozen=True)
class Llama3Config(DecoderConfig):
    """The shape of a Llama; see `DecoderConfig` for the fields."""

    @classmethod
    def read(cls, keys: ConfigKeys) -> DecoderConfig:
        """A Llama: equal blocks of attention and a gated MLP.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        keys = with_type(keys, "LlamaForCausalLM")
        # in Hugging Face's Llama, attention_bias adds a bias to the output projection too
        bias, separate = keys.flag("attention_bias"), keys.value("model_type") == "internlm3"
        # InternLM 3 has separate flags for queries, keys and values, and for all others
        output_bias = keys.flag("mlp_bias") if separate else bias
        config = read_decoder(keys).with_attention(bias=bias, output_bias=output_bias)
        return config.with_mlp(bias=keys.flag("mlp_bias"))
